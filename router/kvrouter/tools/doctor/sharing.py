"""Checks that engines can share KV: family, connector, and all that block names depend on."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from kvrouter.engines.engine import CacheGroup, Role
from kvrouter.engines.families import uses_store
from kvrouter.tools.doctor.base import Found, Setup, error, warning
from kvrouter.tools.doctor.engines import model_groups, odd_ones
from kvrouter.tools.doctor.store import connected_engines, manifests_of
from kvrouter.tools.doctor.trials import unconnected

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.tools.doctor.engines import EngineFacts
    from kvrouter_store.identity.block import Manifest

    Value = Callable[[EngineFacts, Manifest | None], str | None]
    """A property of one engine, from its facts and its manifest; None if unknown."""
    Group = list[tuple[EngineFacts, Manifest | None]]


async def family(setup: Setup) -> Found:
    """Engines of one model hand KV over in one way."""
    for model, group in model_groups(setup.generating_engines):
        odd = odd_ones({each.name: each.engine.family for each in group})
        roles = {each.engine.role for each in group}
        legs = {leg for leg in (Role.PREFILL, Role.DECODE) if any(r.serves(leg) for r in roles)}
        if odd is not None and len(legs) > 1:
            names, value, others = odd
            yield error(
                ", ".join(names),
                f"it hands KV over as {value}, other engines of {model} as {others}: it gets legs "
                "only with engines of its own kind",
                "start it with the --kv-transfer-config of the others, or name the kind of all of "
                "them with --kv-connector",
            )


async def connector(setup: Setup) -> Found:
    """With a store, engines have its connector, and it shares KV."""
    for each in setup.generating_engines:
        if not uses_store(each.engine.family):
            continue
        if each.identity.refusal is not None:
            yield error(
                each.name,
                f"its connector shares no KV: {each.identity.refusal}",
                "change the setting of the engine that the sentence names, and restart it",
            )
        elif setup.settings.store_nodes and each.identity.manifest is None:
            yield error(
                each.name,
                "--store is given, but no connector of it is loaded there: its KV neither goes to "
                "the store nor comes from it",
                "start it with --kv-transfer-config for KVStoreConnector (for `kvrouter sim`: "
                "--store), see docs/vllm.md",
            )


async def connector_waits(setup: Setup) -> Found:
    """With --decode-dispatch chunk or at-once, decode engines can wait for KV."""
    if setup.settings.sent_ahead_blocks is None:
        return
    for each in setup.generating_engines:
        lacks = each.identity.manifest is not None and not each.identity.waits
        if lacks and each.engine.role.serves(Role.DECODE):
            yield warning(
                each.name,
                f"--decode-dispatch {setup.settings.decode_dispatch} is given, but its connector "
                "does not wait for KV: its legs start after the landing nevertheless",
                "install a newer kvrouter in its environment, or give --decode-dispatch landing",
            )


async def same_store(setup: Setup) -> Found:
    """Engines' connectors use the store that the router asks."""
    stores = setup.usable_stores
    if not stores or len(stores) < len(setup.stores):
        return
    engines, urls = setup.generating_engines, ", ".join(each.url for each in stores)
    names = connected_engines(each for store in stores for each in store.registered)
    for manifest, group, missing in unconnected(engines, names):
        connected = len(names.get(manifest, frozenset()))
        yield error(
            ", ".join(each.name for each in missing),
            f"of {len(group)} engines with the manifest {manifest[:12]}, {connected} are "
            f"connected to {urls}",
            "give its connector the url (and token) of the store that --store names",
        )


async def store_node(setup: Setup) -> Found:
    """With several store nodes, each engine names the one that it writes to."""
    nodes = setup.settings.store
    for each in setup.generating_engines:
        if len(nodes) > 1 and each.engine.manifest is not None and each.engine.node not in nodes:
            said = f"names the store node {each.engine.node}" if each.engine.node else "names none"
            yield warning(
                each.name,
                f"it {said}, which --store does not: the router asks all nodes where its KV is, "
                "and sends its decode legs after the landing",
                'set "advertise" in its connector\'s settings to the URL of its node in --store',
            )


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """A cache group that an engine shares through the store."""

    engine: str  # by role and address
    group: str  # the kind of attention, and the group's number in the engine
    reach: int | None  # how many trailing blocks of a prefix a hit needs; None: all

    def __str__(self) -> str:
        """A line for operators."""
        needed = "all blocks" if self.reach is None else f"the last {self.reach} blocks"
        return f"{self.engine} shares {self.group}: a hit needs {needed}"


def shared_groups(setup: Setup) -> list[SharedGroup]:
    """What engines share through the store, by cache group."""
    manifests = manifests_of(setup.usable_stores)
    found = []
    for each in setup.generating_engines:
        identity = each.identity
        if identity.manifest is None or identity.refusal:
            continue
        for group in identity.groups or (CacheGroup(identity.manifest, None),):
            known = manifests.get(group.manifest)
            kind = known.spec.groups[0] if known and known.spec.groups else group.manifest[:12]
            found.append(SharedGroup(each.name, kind, group.reach))
    return found


def block_size(setup: Setup) -> Found:
    """Blocks of engines of one model have equally many tokens."""
    remedy = "start all engines of a model with the same --block-size"
    return _differences(setup, _block_size, "blocks have", remedy)


def block_hashes(setup: Setup) -> Found:
    """Engines of one model name blocks by one algorithm and seed."""
    remedy = (
        "start all engines of a model with the same PYTHONHASHSEED (for `kvrouter sim`: "
        "--hash-seed) and with --prefix-caching-hash-algo sha256_cbor"
    )
    return _differences(setup, _hashes, "blocks are named by", remedy)


def kv_dtype(setup: Setup) -> Found:
    """KV of engines of one model has one data type."""
    remedy = "start all engines of a model with the same --kv-cache-dtype and --dtype"
    return _differences(setup, _dtype, "KV is", remedy)


def weights(setup: Setup) -> Found:
    """Engines of one model have the same weights, revision and adapters."""
    remedy = (
        "start all engines with the same --model and --revision (or `revision` in the connector's "
        "settings, if paths differ)"
    )
    return _differences(setup, _weights, "the weights are", remedy)


def kv_layout(setup: Setup) -> Found:
    """KV of engines of one model has one shape: parts, layers, heads, bytes."""
    remedy = (
        "start all engines with one --tensor-parallel-size and attention backend, or set "
        '"canonical_layout": true in all their connectors, see docs/kv-layouts.md'
    )
    causes = (_block_size, _dtype, _weights)
    return _differences(setup, _layout, "the parts of a block are", remedy, unless=causes)


async def _differences(
    setup: Setup, value: Value, what: str, remedy: str, *, unless: tuple[Value, ...] = ()
) -> Found:
    """Findings for engines of one model that differ in one property.

    `what` begins the finding. A difference in one of `unless` explains this one, and is reported
    by its own check.
    """
    manifests = manifests_of(setup.usable_stores)
    for _, engines in model_groups(setup.generating_engines):
        group = [(each, manifests.get(each.engine.manifest or "")) for each in engines]
        odd = _odd(group, value)
        if odd is not None and all(_odd(group, cause) is None for cause in unless):
            names, mine, others = odd
            finding = f"{what} {mine} there and {others} elsewhere: no KV is shared"
            yield error(", ".join(names), finding, remedy)


def _odd(group: Group, value: Value) -> tuple[list[str], str, str] | None:
    values = {each.name: value(each, manifest) for each, manifest in group}
    return odd_ones({name: known for name, known in values.items() if known is not None})


def _block_size(facts: EngineFacts, manifest: Manifest | None) -> str | None:
    tokens = facts.identity.block_tokens
    return f"{tokens} tokens" if tokens is not None else None


def _hashes(facts: EngineFacts, manifest: Manifest | None) -> str | None:
    """The algorithm, and the root of the hash chains, which depends on the seed."""
    root = facts.identity.root
    if manifest is not None:
        return f"{manifest.spec.hash_algo} from root {manifest.spec.root[:12]}"
    if root is not None:
        return f"hashes from root {root.hex()[:12]}"
    return facts.cache_config.get("prefix_caching_hash_algo")


def _dtype(facts: EngineFacts, manifest: Manifest | None) -> str | None:
    return manifest.spec.kv_dtype if manifest else facts.cache_config.get("cache_dtype")


def _weights(facts: EngineFacts, manifest: Manifest | None) -> str | None:
    if manifest is None:
        return None
    spec = manifest.spec
    adapters = f" with adapters {', '.join(spec.adapters)}" if spec.adapters else ""
    return f"{spec.model} at revision {spec.weights_revision}{adapters}"


def _layout(facts: EngineFacts, manifest: Manifest | None) -> str | None:
    """The parts with their layouts, and a digest of all their properties."""
    if manifest is None:
        return None
    kinds = sorted({f"{part.layout.engine} {part.layout.kind}" for part in manifest.parts})
    content = b"".join(part.digest for part in manifest.parts) + repr(manifest.spec.groups).encode()
    return (
        f"{len(manifest.parts)} of {manifest.block_bytes} bytes together "
        f"({', '.join(kinds)}; {sha256(content).hexdigest()[:8]})"
    )
