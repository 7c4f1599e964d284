"""Checks of the store: whether it can be used, has room, is well, and how KV would travel to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import ByteSize

from kvrouter.membership.probe_client import try_connection
from kvrouter.options.types import by_engine
from kvrouter.prefix.stores import foreign_store, is_foreign
from kvrouter.tools.doctor.base import Found, Setup, each_node, error, remark, warning
from kvrouter.tools.doctor.trials import TRIAL_BLOCKS
from kvrouter_store.connection.address import parse_url
from kvrouter_store.errors import KVStoreError, StoreRefused, Unauthorized, Untrusted
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.tools.doctor.base import Finding
    from kvrouter.tools.doctor.engine_facts import EngineFacts
    from kvrouter.tools.doctor.store_facts import StoreFacts

MANY_NODES: Final = 3  # a host fails often enough
SIGNS_OF_FAULTS: Final = (
    (
        "corrupt_total",
        "blocks arrived with bytes that do not match their digest, and were not stored",
        "look at the memory (ECC log) of the hosts whose engines put them",
    ),
    (
        "disk_dropped_total",
        "blocks could not be read from the disk, or differed from what was written",
        "look at the disk's SMART data and the kernel's log",
    ),
    (
        "bad_frames_total",
        "connections were closed because they broke the protocol",
        "run one version of kvrouter in the router, the store and the engines, and see what else "
        "connects to that port",
    ),
)


async def _failures(setup: Setup) -> list[tuple[str, KVStoreError]]:
    """The URL of each node that cannot be used, and why."""
    return [(each.url, each.error) for each in await setup.all_stores() if each.error is not None]


async def store_reachable(setup: Setup) -> Found:
    """The store answers, in this version of the protocol."""
    for url, failure in await _failures(setup):
        if isinstance(failure, Unauthorized | Untrusted):
            continue
        if isinstance(failure, StoreRefused):
            remedy = "run the same version of kvrouter here and on the store node"
            yield error(url, f"it refuses this client: {failure}", remedy)
        else:
            remedy = "start it (`kvrouter store`), or correct its address and port in --store"
            yield error(url, f"it does not answer: {failure}", remedy)
    for url in filter(is_foreign, setup.settings.store):
        peer = foreign_store(url).peer
        try:
            await peer.stats()
        except KVStoreError as failure:
            remedy = "start it, or correct its address and port (of HTTP) in --store"
            yield error(url, f"it does not answer: {failure}", remedy)
        finally:
            await peer.close()


async def store_token(setup: Setup) -> Found:
    """The store accepts the token that is given."""
    for url, failure in await _failures(setup):
        if isinstance(failure, Unauthorized):
            given = "another one" if setup.settings.store_token.get_secret_value() else "none"
            yield error(
                url,
                f"it asks for a token of its tenants, and got {given}",
                "give one of its --token-file as KVROUTER_STORE_TOKEN, here and to the engines",
            )


async def store_tls(setup: Setup) -> Found:
    """TLS with the store succeeds."""
    for url, failure in await _failures(setup):
        if isinstance(failure, Untrusted):
            yield error(
                url,
                f"TLS with it fails: {failure}",
                "give the CA that signed its certificate as --store-ca-file, and make sure that "
                "the certificate is valid now and names the host of the address"
                if parse_url(url).tls
                else "write its address as kvs://HOST:PORT",
            )


async def store_room(setup: Setup) -> Found:
    """The store's pool holds the longest prompt of each model."""
    for store in await setup.usable_stores(after_trials=True):
        for finding in _room(store, await setup.known_engines()):
            yield finding


def _room(store: StoreFacts, engines: list[EngineFacts]) -> Iterator[Finding]:
    pool = store.stat("pool_bytes")
    needs: dict[str, tuple[int, int]] = {}
    for each in engines:
        manifest, identity = store.manifests.get(each.engine.manifest or ""), each.engine.identity
        if manifest is not None and identity is not None:
            blocks = (identity.max_model_len or 0) // manifest.spec.block_tokens
            needs[manifest.spec.model] = (blocks, manifest.block_bytes)
    for model, (blocks, block_bytes) in needs.items():
        held, needed = pool // block_bytes, max(blocks, TRIAL_BLOCKS)
        if held < needed:
            finding = error if held < TRIAL_BLOCKS else warning
            yield finding(
                store.url,
                f"its pool of {ByteSize(pool).human_readable()} holds {held} blocks of {model}, "
                f"and the longest prompt has {blocks}",
                f"give the store node --memory of several times "
                f"{ByteSize(needed * block_bytes).human_readable()}",
            )


@each_node
async def store_pressure(_: Setup, store: StoreFacts) -> Found:
    """The store refused no blocks for lack of room."""
    if refused := store.stat("no_space_total"):
        yield warning(
            store.url,
            f"{refused} puts found no room since it started: all blocks that could be evicted "
            "were leased or being read",
            "give it more --memory, or an SSD with --disk",
        )
    for tenant, count in store.series("tenant_limited_total."):
        yield warning(
            store.url,
            f"tenant {tenant} reached its quota {count} times, and was refused",
            "raise its --quota, or look at what its engines hold leased",
        )


@each_node
async def store_health(_: Setup, store: StoreFacts) -> Found:
    """The store saw no corrupt blocks, no foreign clients, and no engines that share nothing."""
    for name, what, remedy in SIGNS_OF_FAULTS:
        if count := store.stat(name):
            yield warning(store.url, f"{count} {what}", remedy)
    for refusal in store.refusals:
        yield error(
            refusal.engine,
            f"it is connected to the store and shares nothing: {refusal.reason}",
            "change the setting that the sentence names, and restart the engine",
        )


@each_node
async def store_disk(_: Setup, store: StoreFacts) -> Found:
    """The store uses its disk."""
    reasons = [name for name, _ in store.series("disk_bypassed.")]
    if reasons:
        yield warning(
            store.url,
            f"it does not use its disk: {', '.join(reasons)}",
            "free room on that disk or replace it; the node's log names the error, and the node "
            "tries again by itself",
        )


async def store_tier(setup: Setup) -> Found:
    """Several nodes have one tier below them, so that blocks outlive a node."""
    stores = await setup.usable_stores()
    without = [each.url for each in stores if not each.stat("tiered")]
    if without and (len(stores) >= MANY_NODES or len(without) < len(stores)):
        yield remark(
            ", ".join(without),
            f"of {len(stores)} nodes, these have no tier: their blocks are lost with them, and "
            "the others compute them again",
            "start all nodes with the same --tier, such as mooncake://MASTER:50051",
        )
    named = [each for each in stores if each.tiers]
    if len({frozenset(each.tiers) for each in named}) > 1:
        yield remark(
            ", ".join(f"{each.url} ({', '.join(each.tiers)})" for each in named),
            "these nodes name different tiers: if these are different stores, a node lacks what "
            "others wrote",
            "start all nodes with the same --tier",
        )


@each_node
async def store_tier_up(_: Setup, store: StoreFacts) -> Found:
    """The tiers below the store answer."""
    away = [name for name, up in store.tiers.items() if not up]
    if away:
        yield warning(
            store.url,
            f"it does not use its tier: {', '.join(away)} does not answer",
            "start that server, or correct --tier; the node's log names the error, and the node "
            "tries again by itself",
        )


@each_node
async def store_transport(_: Setup, store: StoreFacts) -> Found:
    """Clients on the store's host map its memory."""
    if not store.here or store.transport == "shm":
        return
    if store.transport == "unix":
        yield remark(
            store.url,
            "clients on this host use its Unix socket and cannot map its memory: it serves several "
            "tenants, or they lack the permission",
            "run a node for each tenant if speed matters",
        )
        return
    socket = f"its Unix socket {store.socket} cannot be reached from here"
    yield warning(
        store.url,
        f"it runs on this host, and yet KV would travel over {store.transport.upper()}: "
        f"{socket if store.socket else 'it has no Unix socket'}",
        "start it with --unix-socket in a folder that its clients' containers mount too, as one "
        "user or with --unix-socket-mode 0660",
    )


@each_node
async def store_rdma(setup: Setup, store: StoreFacts) -> Found:
    """KV travels over RDMA if this host has a device."""
    if store.here or store.transport != "tcp" or not setup.host.has_rdma:
        return
    if parse_url(store.url).tls:
        why, remedy = "TLS excludes it", "use kv:// in a network of your own"
    else:
        why = store.no_rdma or "the node offers none"
        remedy = "do what the sentence says, and start the node with --rdma on to see why not"
    finding = f"KV travels over TCP although this host has an RDMA device: {why}"
    yield remark(store.url, finding, remedy)


@each_node
async def store_events(setup: Setup, store: StoreFacts) -> Found:
    """With --store-events-connect, the store publishes what it holds."""
    settings, place = setup.settings, store.url.partition("://")[2]
    for flag, what, given in (
        ("connect", "publishes no events", settings.store_events_connect),
        ("replay", "repeats no events", settings.store_events_replay),
    ):
        ports = by_engine(given)
        port = ports.get(place, ports.get("", 0))
        if not port or place.startswith("/"):
            return
        try:
            await try_connection(parse_url(store.url).host, port, setup.deadline_s)
        except OSError as problem:
            reason = reason_of(problem) or "no answer in time"
            yield warning(
                store.url,
                f"it {what} at port {port}, and so is asked for each prompt: {reason}",
                f"start it with --kv-events-config, or correct --store-events-{flag}",
            )
            return
