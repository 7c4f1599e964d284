"""Checks of the store: whether it can be used, has room, is well, and how KV would travel to it."""

from __future__ import annotations

import asyncio
from typing import Final

from pydantic import ByteSize

from kvrouter.prefix import stores
from kvrouter.tools.doctor.base import Found, Setup, error, remark, warning
from kvrouter.tools.doctor.trials import TRIAL_BLOCKS
from kvrouter_store.connection.address import parse_url
from kvrouter_store.errors import KVStoreError, StoreRefused, Unauthorized, Untrusted

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


async def _failure(setup: Setup) -> tuple[str, KVStoreError | None]:
    """The store's URL, and why it cannot be used."""
    facts = await asyncio.shield(setup.store) if setup.store is not None else None
    return (facts.url, facts.error) if facts is not None else ("", None)


async def store_reachable(setup: Setup) -> Found:
    """The store answers, in this version of the protocol."""
    url, failure = await _failure(setup)
    if failure is None or isinstance(failure, Unauthorized | Untrusted):
        return
    if isinstance(failure, StoreRefused):
        remedy = "run the same version of kvrouter here and on the store node"
        yield error(url, f"it refuses this client: {failure}", remedy)
    else:
        remedy = "start it (`kvrouter store`), or correct its address and port in --store"
        yield error(url, f"it does not answer: {failure}", remedy)


async def foreign_store(setup: Setup) -> Found:
    """The Mooncake master, or LMCache's coordinator, that --store names answers."""
    url = setup.settings.store
    if url is None or setup.settings.store_node is not None:
        return
    peer, _ = stores.foreign_store(url)
    try:
        await peer.stats()
    except KVStoreError as failure:
        remedy = "start it, or correct its address and port (of HTTP) in --store"
        yield error(url, f"it does not answer: {failure}", remedy)
    finally:
        await peer.close()


async def store_token(setup: Setup) -> Found:
    """The store accepts the token that is given."""
    url, failure = await _failure(setup)
    if isinstance(failure, Unauthorized):
        given = "another one" if setup.settings.store_token.get_secret_value() else "none"
        yield error(
            url,
            f"it asks for a token of its tenants, and got {given}",
            "give one of its --token-file as KVROUTER_STORE_TOKEN, here and to the engines",
        )


async def store_tls(setup: Setup) -> Found:
    """TLS with the store succeeds."""
    url, failure = await _failure(setup)
    if isinstance(failure, Untrusted):
        yield error(
            url,
            f"TLS with it fails: {failure}",
            "give the CA that signed its certificate as --store-ca-file, and make sure that the "
            "certificate is valid now and names the host of the address"
            if parse_url(url).tls
            else "write its address as kvs://HOST:PORT",
        )


async def store_room(setup: Setup) -> Found:
    """The store's pool holds the longest prompt of each model."""
    store = await setup.usable_store(after_trials=True)
    if store is None:
        return
    pool = store.stat("pool_bytes")
    needs: dict[str, tuple[int, int]] = {}
    for each in await setup.known_engines():
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


async def store_pressure(setup: Setup) -> Found:
    """The store refused no blocks for lack of room."""
    store = await setup.usable_store()
    if store is None:
        return
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


async def store_health(setup: Setup) -> Found:
    """The store saw no corrupt blocks, no foreign clients, and no engines that share nothing."""
    store = await setup.usable_store()
    if store is None:
        return
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
    store = await setup.usable_store()
    reasons = [name for name, _ in store.series("disk_bypassed.")] if store is not None else []
    if store is not None and reasons:
        yield warning(
            store.url,
            f"it does not use its disk: {', '.join(reasons)}",
            "free room on that disk or replace it; the node's log names the error, and the node "
            "tries again by itself",
        )


async def store_transport(setup: Setup) -> Found:
    """Clients on the store's host map its memory."""
    store = await setup.usable_store()
    if store is None or not store.here or store.transport == "shm":
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


async def store_rdma(setup: Setup) -> Found:
    """KV travels over RDMA if this host has a device."""
    store = await setup.usable_store()
    if store is None or store.here or store.transport != "tcp" or not setup.host.has_rdma:
        return
    if parse_url(store.url).tls:
        why, remedy = "TLS excludes it", "use kv:// in a network of your own"
    else:
        why = store.no_rdma or "the node offers none"
        remedy = "do what the sentence says, and start the node with --rdma on to see why not"
    finding = f"KV travels over TCP although this host has an RDMA device: {why}"
    yield remark(store.url, finding, remedy)
