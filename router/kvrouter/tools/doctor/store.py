"""The store: what the doctor learns of its nodes as a client, and the checks of that.

They ask whether it can be used, has room, is well, and how KV would travel to it.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pydantic import ByteSize

from kvrouter.membership.probe_client import connection_problem
from kvrouter.options.types import by_engine
from kvrouter.prefix.stores import foreign_store, is_foreign
from kvrouter.tools.doctor.base import Found, Setup, error, remark, warning
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.address import local_boot_id, parse_url
from kvrouter_store.errors import KVStoreError, StoreRefused, Unauthorized, Untrusted
from kvrouter_store.rdma.base import RdmaUnavailable
from kvrouter_store.rdma.initiator import Initiator

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvrouter.app.settings import RouterSettings
    from kvrouter_store.client.results import RegisteredManifest, SharingRefusal
    from kvrouter_store.identity.block import Manifest

TRIAL_BLOCKS: Final = 4
"""Blocks of a trial prompt that can be handed over; it has one token more, to compute."""
NAME: Final = "doctor"
DEADLINE_S: Final = 10.0
_PART: Final = re.compile(r"/(rank\d+|landings)$")
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


@dataclass(slots=True)
class StoreFacts:
    """What is known of a node of the store."""

    url: str
    error: KVStoreError | None = None  # why it cannot be used; None if it can
    stats: Mapping[str, int] = field(default_factory=dict)  # the node's gauges and counters
    # Manifests, and names of the connected engines that need each.
    registered: Sequence[RegisteredManifest] = ()
    refusals: tuple[SharingRefusal, ...] = ()  # connected engines that share nothing, and why
    transport: str = ""  # how KV would travel to a client on this host: shm, unix, rdma or tcp
    here: bool = False  # whether it runs on this host
    socket: str = ""  # the Unix socket that it names; "" for none
    no_rdma: str = ""  # why RDMA is not available here; "" if it is

    def stat(self, name: str) -> int:
        """One figure, 0 if the node has none of that name."""
        return self.stats.get(name, 0)

    def series(self, prefix: str) -> dict[str, int]:
        """The figures whose names begin with `prefix`, by the rest of the name."""
        found = self.stats.items()
        return {name[len(prefix) :]: v for name, v in found if name.startswith(prefix)}


async def learn_store(settings: RouterSettings, url: str) -> StoreFacts:
    """Ask a node everything. Never raises for what the node does."""
    facts = StoreFacts(url)
    try:
        await asyncio.to_thread(_ask, settings, facts)
    except KVStoreError as error:
        facts.error = error
    return facts


def _ask(settings: RouterSettings, facts: StoreFacts) -> None:
    """Raises KVStoreError if the store cannot be used."""
    token, tls, rdma = settings.store_token.get_secret_value(), settings.store_tls, Initiator()
    try:
        rdma.open()
    except RdmaUnavailable as problem:
        facts.no_rdma = str(problem)
    with StoreClient(
        facts.url, name=NAME, token=token, tls=tls, deadline_s=DEADLINE_S, rdma=rdma
    ) as client:
        facts.registered = client.manifests()
        facts.refusals = tuple(client.refusals())
        facts.stats = client.stats()
        facts.transport = client.transport
        hello = client.channels()[0].hello
        facts.here = hello.boot_id != "" and hello.boot_id == local_boot_id()
        facts.socket = hello.unix_path


def connected_engines(registered: Iterable[RegisteredManifest]) -> dict[str, frozenset[str]]:
    """Names of the connected engines that need each manifest, by its hex digest.

    The ranks and other connections of an engine count as one.
    """
    found: dict[str, frozenset[str]] = {}
    for each in registered:
        names = frozenset(_PART.sub("", name) for name in each.engines)
        found[each.digest.hex()] = found.get(each.digest.hex(), frozenset()) | names
    return found


def manifests_of(stores: Iterable[StoreFacts]) -> dict[str, Manifest]:
    """What engines have registered with any of these nodes, by its hex digest."""
    return {each.digest.hex(): each.manifest for store in stores for each in store.registered}


async def store_reachable(setup: Setup) -> Found:
    """The store answers, in this version of the protocol."""
    for each in setup.stores:
        if each.error is None or isinstance(each.error, Unauthorized | Untrusted):
            continue
        if isinstance(each.error, StoreRefused):
            remedy = "run the same version of kvrouter here and on the store node"
            yield error(each.url, f"it refuses this client: {each.error}", remedy)
        else:
            remedy = "start it (`kvrouter store`), or correct its address and port in --store"
            yield error(each.url, f"it does not answer: {each.error}", remedy)
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
    for each in setup.stores:
        if isinstance(each.error, Unauthorized):
            given = "another one" if setup.settings.store_token.get_secret_value() else "none"
            yield error(
                each.url,
                f"it asks for a token of its tenants, and got {given}",
                "give one of its --token-file as KVROUTER_STORE_TOKEN, here and to the engines",
            )


async def store_tls(setup: Setup) -> Found:
    """TLS with the store succeeds."""
    for each in setup.stores:
        if isinstance(each.error, Untrusted):
            yield error(
                each.url,
                f"TLS with it fails: {each.error}",
                "give the CA that signed its certificate as --store-ca-file, and make sure that "
                "the certificate is valid now and names the host of the address"
                if parse_url(each.url).tls
                else "write its address as kvs://HOST:PORT",
            )


async def store_room(setup: Setup) -> Found:
    """The store's pool holds the longest prompt of each model."""
    for store in setup.usable_stores:
        pool, manifests = store.stat("pool_bytes"), manifests_of([store])
        needs: dict[str, tuple[int, int]] = {}
        for each in setup.known_engines:
            if manifest := manifests.get(each.engine.manifest or ""):
                blocks = (each.identity.max_model_len or 0) // manifest.spec.block_tokens
                needs[manifest.spec.model] = (blocks, manifest.block_bytes)
        for model, (blocks, block_bytes) in needs.items():
            held, needed = pool // block_bytes, max(blocks, TRIAL_BLOCKS)
            if held < needed:
                finding = error if held < TRIAL_BLOCKS else warning
                yield finding(
                    store.url,
                    f"its pool of {ByteSize(pool).human_readable()} holds {held} blocks of "
                    f"{model}, and the longest prompt has {blocks}",
                    f"give the store node --memory of several times "
                    f"{ByteSize(needed * block_bytes).human_readable()}",
                )


async def store_pressure(setup: Setup) -> Found:
    """The store refused no blocks for lack of room."""
    for store in setup.usable_stores:
        if refused := store.stat("no_space_total"):
            yield warning(
                store.url,
                f"{refused} puts found no room since it started: all blocks that could be evicted "
                "were leased or being read",
                "give it more --memory, or an SSD with --disk",
            )
        for tenant, count in store.series("tenant_limited_total.").items():
            if count:
                yield warning(
                    store.url,
                    f"tenant {tenant} reached its quota {count} times, and was refused",
                    "raise its --quota, or look at what its engines hold leased",
                )


async def store_health(setup: Setup) -> Found:
    """The store saw no corrupt blocks, no foreign clients, and no engines that share nothing."""
    for store in setup.usable_stores:
        for name, what, remedy in SIGNS_OF_FAULTS:
            if count := store.stat(name):
                yield warning(store.url, f"{count} {what}", remedy)
        for refusal in store.refusals:
            yield error(
                refusal.engine,
                f"it is connected to the store and shares nothing: {refusal.reason}",
                "change the setting that the sentence names, and restart the engine",
            )


async def store_disk(setup: Setup) -> Found:
    """The store uses its disk."""
    for store in setup.usable_stores:
        reasons = [name for name, now in store.series("disk_bypassed.").items() if now]
        if reasons:
            yield warning(
                store.url,
                f"it does not use its disk: {', '.join(reasons)}",
                "free room on that disk or replace it; the node's log names the error, and the "
                "node tries again by itself",
            )


async def store_tier(setup: Setup) -> Found:
    """Several nodes have one tier below them, so that blocks outlive a node."""
    stores = setup.usable_stores
    without = [each.url for each in stores if not each.stat("tiered")]
    if without and (len(stores) >= MANY_NODES or len(without) < len(stores)):
        yield remark(
            ", ".join(without),
            f"of {len(stores)} nodes, these have no tier: their blocks are lost with them, and "
            "the others compute them again",
            "start all nodes with the same --tier, such as mooncake://MASTER:50051",
        )
    named = {each.url: tiers for each in stores if (tiers := each.series("tier_up."))}
    if len(set(map(frozenset, named.values()))) > 1:
        yield remark(
            ", ".join(f"{url} ({', '.join(tiers)})" for url, tiers in named.items()),
            "these nodes name different tiers: if these are different stores, a node lacks what "
            "others wrote",
            "start all nodes with the same --tier",
        )


async def store_tier_up(setup: Setup) -> Found:
    """The tiers below the store answer."""
    for store in setup.usable_stores:
        away = [name for name, up in store.series("tier_up.").items() if not up]
        if away:
            yield warning(
                store.url,
                f"it does not use its tier: {', '.join(away)} does not answer",
                "start that server, or correct --tier; the node's log names the error, and the "
                "node tries again by itself",
            )


async def store_transport(setup: Setup) -> Found:
    """Clients on the store's host map its memory."""
    for store in setup.usable_stores:
        if not store.here or store.transport == "shm":
            continue
        if store.transport == "unix":
            yield remark(
                store.url,
                "clients on this host use its Unix socket and cannot map its memory: it serves "
                "several tenants, or they lack the permission",
                "run a node for each tenant if speed matters",
            )
            continue
        socket = f"its Unix socket {store.socket} cannot be reached from here"
        yield warning(
            store.url,
            f"it runs on this host, and yet KV would travel over {store.transport.upper()}: "
            f"{socket if store.socket else 'it has no Unix socket'}",
            "start it with --unix-socket in a folder that its clients' containers mount too, as "
            "one user or with --unix-socket-mode 0660",
        )


async def store_rdma(setup: Setup) -> Found:
    """KV travels over RDMA if this host has a device."""
    for store in setup.usable_stores:
        if store.here or store.transport != "tcp" or not setup.host.has_rdma:
            continue
        if parse_url(store.url).tls:
            why, remedy = "TLS excludes it", "use kv:// in a network of your own"
        else:
            why = store.no_rdma or "the node offers none"
            remedy = "do what the sentence says, and start the node with --rdma on to see why not"
        finding = f"KV travels over TCP although this host has an RDMA device: {why}"
        yield remark(store.url, finding, remedy)


async def store_events(setup: Setup) -> Found:
    """With --store-events-connect, the store publishes what it holds."""
    for store in setup.usable_stores:
        settings, place = setup.settings, store.url.partition("://")[2]
        for flag, what, given in (
            ("connect", "publishes no events", settings.store_events_connect),
            ("replay", "repeats no events", settings.store_events_replay),
        ):
            ports = by_engine(given)
            port = ports.get(place, ports.get("", 0))
            if not port or place.startswith("/"):
                break
            host = parse_url(store.url).host
            if problem := await connection_problem(host, port, setup.deadline_s):
                yield warning(
                    store.url,
                    f"it {what} at port {port}, and so is asked for each prompt: {problem}",
                    f"start it with --kv-events-config, or correct --store-events-{flag}",
                )
                break
