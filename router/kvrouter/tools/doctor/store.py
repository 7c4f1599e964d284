"""Checks of the store: whether it can be used, has room, is well, and how KV would travel to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import ByteSize

from kvrouter.tools.doctor.base import Check, SetUp, error, remark, warning
from kvrouter.tools.doctor.limits import has_rdma
from kvrouter.tools.doctor.trials import TRIAL_BLOCKS
from kvrouter_store.connection.address import parse_url
from kvrouter_store.errors import StoreRefused, Unauthorized, Untrusted

if TYPE_CHECKING:
    from kvrouter.tools.doctor.base import Found
    from kvrouter_store.errors import KVStoreError
    from kvrouter_store.identity.block import Manifest

RARE: Final = (
    (
        "corrupt_total",
        "blocks came with bytes that are not those of their digest, and were not stored",
        "look at the memory (ECC log) of the hosts whose engines put them",
    ),
    (
        "disk_dropped_total",
        "blocks could not be read from the disk, or were not what had been written",
        "look at the disk's SMART data and the kernel's log",
    ),
    (
        "bad_frames_total",
        "connections were ended for breaking the protocol",
        "run one version of kvrouter in the router, the store and the engines, and see what else "
        "connects to that port",
    ),
)


async def _failure(setup: SetUp) -> tuple[str, KVStoreError | None]:
    """The store's URL, and why it cannot be used."""
    facts = await setup.store.get() if setup.store is not None else None
    return (facts.url, facts.error) if facts is not None else ("", None)


async def _reachable(setup: SetUp) -> Found:
    url, failure = await _failure(setup)
    if failure is None or isinstance(failure, Unauthorized | Untrusted):
        return
    if isinstance(failure, StoreRefused):
        remedy = "run the same version of kvrouter here and on the store node"
        yield error(url, f"it refuses this client: {failure}", remedy)
    else:
        remedy = "start it (`kvrouter store`), or mend its address and port in --store"
        yield error(url, f"it does not answer: {failure}", remedy)


async def _token(setup: SetUp) -> Found:
    url, failure = await _failure(setup)
    if isinstance(failure, Unauthorized):
        given = "another one" if setup.settings.store_token.get_secret_value() else "none"
        yield error(
            url,
            f"it asks for a token of its tenants, and was shown {given}",
            "give one of its --token-file as KVROUTER_STORE_TOKEN, here and to the engines",
        )


async def _tls(setup: SetUp) -> Found:
    url, failure = await _failure(setup)
    if isinstance(failure, Untrusted):
        yield error(
            url,
            f"TLS with it fails: {failure}",
            "give the CA that signed its certificate as --store-ca-file, and see that the "
            "certificate is valid now and names the host of the address"
            if parse_url(url).tls
            else "write its address as kvs://HOST:PORT",
        )


async def _room(setup: SetUp) -> Found:
    """What the pool holds beside one prompt of each model."""
    store = await setup.the_settled_store()
    if store is None:
        return
    pool = store.stat("pool_bytes")
    needs: dict[str, tuple[Manifest, int]] = {}
    for each in await setup.known_engines():
        manifest = store.manifests.get(each.engine.manifest or "")
        identity = each.engine.identity
        if manifest is not None and identity is not None:
            length = identity.max_model_len or 0
            needs[manifest.spec.model] = (manifest, length // manifest.spec.block_tokens)
    for model, (manifest, blocks) in needs.items():
        held = pool // manifest.block_bytes
        size = ByteSize(max(blocks, TRIAL_BLOCKS) * manifest.block_bytes).human_readable()
        if held < max(blocks, TRIAL_BLOCKS):
            told = error if held < TRIAL_BLOCKS else warning
            yield told(
                store.url,
                f"its pool of {ByteSize(pool).human_readable()} holds {held} blocks of {model}, "
                f"and the longest prompt has {blocks}",
                f"give the store node --memory of several times {size}",
            )


async def _pressure(setup: SetUp) -> Found:
    store = await setup.the_store()
    if store is None:
        return
    if refused := store.stat("no_space_total"):
        yield warning(
            store.url,
            f"{refused} puts found no room since it started: what could have gone was leased or "
            "being read",
            "give it more --memory, or an SSD with --disk",
        )
    for tenant, count in store.series("tenant_limited_total."):
        yield warning(
            store.url,
            f"tenant {tenant} was refused {count} times for having more than it may",
            "raise its --quota, or look at what its engines hold leased",
        )


async def _health(setup: SetUp) -> Found:
    store = await setup.the_store()
    if store is None:
        return
    for name, what, remedy in RARE:
        if count := store.stat(name):
            yield warning(store.url, f"{count} {what}", remedy)
    for refusal in store.refusals:
        yield error(
            refusal.engine,
            f"it is connected to the store and shares nothing: {refusal.reason}",
            "change the setting that the sentence names, and restart the engine",
        )


async def _disk(setup: SetUp) -> Found:
    store = await setup.the_store()
    reasons = [name for name, _ in store.series("disk_bypassed.")] if store is not None else []
    if store is not None and reasons:
        yield warning(
            store.url,
            f"it does not use its disk: {', '.join(reasons)}",
            "free room on that disk or replace it; the node's log names the error, and it tries "
            "again by itself",
        )


async def _transport(setup: SetUp) -> Found:
    store = await setup.the_store()
    if store is None or not store.here or store.transport == "shm":
        return
    if store.transport == "unix":
        yield remark(
            store.url,
            "clients of this host get its Unix socket, and not its memory: it serves several "
            "tenants, or they may not map it",
            "run a node for each tenant where speed matters",
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


async def _no_rdma(setup: SetUp) -> Found:
    """A host with an RDMA device whose clients would take TCP all the same."""
    store = await setup.the_store()
    if store is None or store.here or store.transport != "tcp" or not has_rdma(setup.host):
        return
    if parse_url(store.url).tls:
        why, remedy = "TLS excludes it", "use kv:// in a network of your own"
    else:
        why = store.no_rdma or "the node offers none"
        remedy = "do what the sentence says, and start the node with --rdma on to hear why not"
    finding = f"KV travels over TCP although this host has an RDMA device: {why}"
    yield remark(store.url, finding, remedy)


CHECKS: Final = (
    Check("store-reachable", "the store answers, in this version of the protocol", _reachable),
    Check("store-token", "the store takes the token that is given", _token),
    Check("store-tls", "TLS with the store succeeds", _tls),
    Check("store-room", "the store's pool holds the longest prompt of each model", _room),
    Check("store-pressure", "nobody was refused room in the store", _pressure),
    Check("store-health", "no corrupt blocks, strangers, or engines that share nothing", _health),
    Check("store-disk", "the store uses the disk that it was given", _disk),
    Check("store-transport", "clients on the store's host map its memory", _transport),
    Check("store-rdma", "where there is RDMA, it is used", _no_rdma),
)
