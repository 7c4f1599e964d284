"""Checks of the store: whether it can be used, has room, is well, and how KV would travel to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import ByteSize

from kvrouter.doctor.base import Check, Finding, SetUp, Severity
from kvrouter.doctor.trials import TRIAL_BLOCKS
from kvstore.address import parse_url
from kvstore.errors import StoreRefused, Unauthorized, Untrusted

if TYPE_CHECKING:
    from kvstore.block import Manifest

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


async def _reachable(setup: SetUp) -> list[Finding]:
    facts = await setup.store.get() if setup.store is not None else None
    if facts is None or facts.error is None or isinstance(facts.error, Unauthorized | Untrusted):
        return []
    if isinstance(facts.error, StoreRefused):
        remedy = "run the same version of kvrouter here and on the store node"
        sentence = f"it refuses this client: {facts.error}"
    else:
        remedy = "start it (`kvrouter store`), or mend its address and port in --store"
        sentence = f"it does not answer: {facts.error}"
    return [Finding(Severity.ERROR, facts.url, sentence, remedy)]


async def _token(setup: SetUp) -> list[Finding]:
    facts = await setup.store.get() if setup.store is not None else None
    if facts is None or not isinstance(facts.error, Unauthorized):
        return []
    given = "another one" if setup.settings.store_token.get_secret_value() else "none"
    return [
        Finding(
            Severity.ERROR,
            facts.url,
            f"it asks for a token of its tenants, and was shown {given}",
            "give one of its --token-file as KVROUTER_STORE_TOKEN, here and to the engines",
        )
    ]


async def _tls(setup: SetUp) -> list[Finding]:
    facts = await setup.store.get() if setup.store is not None else None
    if facts is None or not isinstance(facts.error, Untrusted):
        return []
    remedy = (
        "give the CA that signed its certificate as --store-ca-file, and see that the certificate "
        "is valid now and names the host of the address"
        if parse_url(facts.url).tls
        else "write its address as kvs://HOST:PORT"
    )
    return [Finding(Severity.ERROR, facts.url, f"TLS with it fails: {facts.error}", remedy)]


async def _room(setup: SetUp) -> list[Finding]:
    """What the pool holds beside one prompt of each model."""
    store = await setup.the_settled_store()
    if store is None:
        return []
    pool, found = store.stat("pool_bytes"), []
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
        severity = Severity.ERROR if held < TRIAL_BLOCKS else Severity.WARNING
        if held < max(blocks, TRIAL_BLOCKS):
            finding = (
                f"its pool of {ByteSize(pool).human_readable()} holds {held} blocks of {model}, "
                f"and the longest prompt has {blocks}"
            )
            remedy = f"give the store node --memory of several times {size}"
            found.append(Finding(severity, store.url, finding, remedy))
    return found


async def _pressure(setup: SetUp) -> list[Finding]:
    store = await setup.the_store()
    if store is None:
        return []
    found = []
    refused = store.stat("no_space_total")
    if refused:
        found.append(
            Finding(
                Severity.WARNING,
                store.url,
                f"{refused} puts found no room since it started: what could have gone was leased "
                "or being read",
                "give it more --memory, or an SSD with --disk",
            )
        )
    limited = {
        name.removeprefix("tenant_limited_total."): count
        for name, count in store.stats.items()
        if name.startswith("tenant_limited_total.") and count
    }
    for tenant, count in limited.items():
        finding = f"tenant {tenant} was refused {count} times for having more than it may"
        remedy = "raise its --quota, or look at what its engines hold leased"
        found.append(Finding(Severity.WARNING, store.url, finding, remedy))
    return found


async def _health(setup: SetUp) -> list[Finding]:
    store = await setup.the_store()
    if store is None:
        return []
    found = [
        Finding(Severity.WARNING, store.url, f"{store.stat(name)} {what}", remedy)
        for name, what, remedy in RARE
        if store.stat(name)
    ]
    found += [
        Finding(
            Severity.ERROR,
            refusal.engine,
            f"it is connected to the store and shares nothing: {refusal.reason}",
            "change the setting that the sentence names, and restart the engine",
        )
        for refusal in store.refusals
    ]
    return found


async def _disk(setup: SetUp) -> list[Finding]:
    store = await setup.the_store()
    if store is None:
        return []
    reasons = [
        name.removeprefix("disk_bypassed.")
        for name, value in store.stats.items()
        if name.startswith("disk_bypassed.") and value
    ]
    if not reasons:
        return []
    return [
        Finding(
            Severity.WARNING,
            store.url,
            f"it does not use its disk: {', '.join(reasons)}",
            "free room on that disk or replace it; the node's log names the error, and it tries "
            "again by itself",
        )
    ]


async def _transport(setup: SetUp) -> list[Finding]:
    store = await setup.the_store()
    if store is None or not store.here or store.transport == "shm":
        return []
    if store.transport == "unix":
        return [
            Finding(
                Severity.INFO,
                store.url,
                "clients of this host get its Unix socket, and not its memory: it serves several "
                "tenants, or they may not map it",
                "run a node for each tenant where speed matters",
            )
        ]
    socket = (
        f"its Unix socket {store.socket} cannot be reached from here"
        if store.socket
        else "it has no Unix socket"
    )
    return [
        Finding(
            Severity.WARNING,
            store.url,
            f"it runs on this host, and yet KV would travel over {store.transport.upper()}: "
            f"{socket}",
            "start it with --unix-socket in a folder that its clients' containers mount too, as "
            "one user or with --unix-socket-mode 0660",
        )
    ]


async def _no_rdma(setup: SetUp) -> list[Finding]:
    """A host with an RDMA device whose clients would take TCP all the same."""
    store = await setup.the_store()
    if store is None or store.here or store.transport != "tcp":
        return []
    if not setup.host.sysfs_rdma.is_dir() or not any(setup.host.sysfs_rdma.iterdir()):
        return []
    if parse_url(store.url).tls:
        why, remedy = "TLS excludes it", "use kv:// in a network of your own"
    else:
        why = store.no_rdma or "the node offers none"
        remedy = "do what the sentence says, and start the node with --rdma on to hear why not"
    finding = f"KV travels over TCP although this host has an RDMA device: {why}"
    return [Finding(Severity.INFO, store.url, finding, remedy)]


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
