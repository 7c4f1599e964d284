"""Checks of whether engines can share KV: family, connector, all that gives blocks names."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Role
from kvrouter.tools.doctor.base import Check, SetUp, error, warning
from kvrouter.tools.doctor.engines import model_groups, odd_ones
from kvrouter.tools.doctor.links import unconnected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrouter.tools.doctor.base import Found
    from kvrouter.tools.doctor.engine_facts import EngineFacts
    from kvrouter_store.identity.block import Manifest

    Told = Callable[[EngineFacts, Manifest | None], str | None]
    """What one engine tells of one thing, by its facts and its manifest; None: it does not."""


async def _families(setup: SetUp) -> Found:
    for model, group in model_groups(await setup.generating_engines()):
        odd = odd_ones({each.name: each.engine.family for each in group})
        if odd is not None and {"prefill", "decode"} <= _legs(group):
            names, value, others = odd
            yield error(
                ", ".join(names),
                f"it hands KV over as {value}, other engines of {model} as {others}: it gets legs "
                "only with engines of its own kind",
                "start it with the --kv-transfer-config of the others, or say with --kv-connector "
                "what all of them are",
            )


def _legs(group: Iterable[EngineFacts]) -> set[str]:
    roles = {each.engine.role for each in group}
    return {leg.value for leg in (Role.PREFILL, Role.DECODE) for r in roles if r.serves(leg)}


async def _connector(setup: SetUp) -> Found:
    """KV goes through the store by a connector that tells its manifest."""
    for each in await setup.generating_engines():
        identity = each.engine.identity
        if identity is None or each.engine.family != "store":
            continue
        if identity.refusal is not None:
            yield error(
                each.name,
                f"its connector shares no KV: {identity.refusal}",
                "change the setting of the engine that the sentence names, and restart it",
            )
        elif setup.settings.store is not None and identity.manifest is None:
            yield error(
                each.name,
                "--store is given, but no connector of it is loaded there: its KV neither goes to "
                "the store nor comes from it",
                "start it with --kv-transfer-config for KVStoreConnector (for `kvrouter sim`: "
                "--store), see docs/vllm.md",
            )


async def _waits(setup: SetUp) -> Found:
    if setup.settings.sent_ahead_blocks is None:
        return
    for each in await setup.generating_engines():
        identity = each.engine.identity
        if identity is None or identity.manifest is None or identity.waits:
            continue
        if each.engine.role.serves(Role.DECODE):
            yield warning(
                each.name,
                f"--decode-dispatch {setup.settings.decode_dispatch} is given, but its connector "
                "does not wait for KV that is on its way: its legs go after the landing all the "
                "same",
                "install a newer kvrouter in its environment, or give --decode-dispatch landing",
            )


async def _same_store(setup: SetUp) -> Found:
    """As many engines are connected to the store as say that they need a manifest."""
    store = await setup.the_settled_store()
    if store is None:
        return
    engines = await setup.generating_engines()
    for manifest, group, missing in unconnected(engines, store.engines):
        connected = len(store.engines.get(manifest, frozenset()))
        yield error(
            ", ".join(each.name for each in missing),
            f"of {len(group)} engines with the manifest {manifest[:12]}, {connected} are "
            f"connected to {store.url}",
            "give its connector the url (and token) of the store that --store names",
        )


async def _agree(
    setup: SetUp, *, told: Told, what: str, how: str, unless: tuple[Told, ...] = ()
) -> Found:
    """Whether all engines of a model tell the same of one thing.

    Args:
        setup: what is examined.
        told: what one engine tells.
        what: the thing, as a finding begins.
        how: the remedy.
        unless: other things that make this one differ: where they do, theirs is the finding.
    """
    for group in await _manifests(setup):
        if any(_odd(group, other) is not None for other in unless):
            continue
        if odd := _odd(group, told):
            names, value, others = odd
            finding = f"{what} {value} there and {others} elsewhere: no KV is shared"
            yield error(", ".join(names), finding, how)


Group = list[tuple["EngineFacts", "Manifest | None"]]


async def _manifests(setup: SetUp) -> list[Group]:
    """The engines of each model, each with its manifest where the store knows that."""
    store = await setup.the_settled_store()
    known = store.manifests if store is not None else {}
    groups = model_groups(await setup.generating_engines())
    return [
        [(each, known.get(each.engine.manifest or "")) for each in group] for _, group in groups
    ]


def _odd(group: Group, told: Told) -> tuple[list[str], str, str] | None:
    values = {each.name: told(each, manifest) for each, manifest in group}
    return odd_ones({name: value for name, value in values.items() if value is not None})


def _block_size(facts: EngineFacts, manifest: Manifest | None) -> str | None:
    identity = facts.engine.identity
    if identity is None or identity.block_tokens is None:
        return None
    return f"{identity.block_tokens} tokens"


def _hashes(facts: EngineFacts, manifest: Manifest | None) -> str | None:
    """The algorithm, and the root of chains, which stands for the seed."""
    identity = facts.engine.identity
    if manifest is not None:
        return f"{manifest.spec.hash_algo} from root {manifest.spec.root[:12]}"
    if identity is not None and identity.root is not None:
        return f"hashes from root {identity.root.hex()[:12]}"
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
    """Parts and their layouts, and a name for all that they say."""
    if manifest is None:
        return None
    kinds = sorted({f"{part.layout.engine} {part.layout.kind}" for part in manifest.parts})
    all_said = (
        b"".join(part.digest for part in manifest.parts) + repr(manifest.spec.groups).encode()
    )
    return (
        f"{len(manifest.parts)} of {manifest.block_bytes} bytes together "
        f"({', '.join(kinds)}; {sha256(all_said).hexdigest()[:8]})"
    )


CHECKS: Final = (
    Check("family", "engines of one model hand KV over in one way", _families),
    Check("connector", "engines before a store have its connector, and it shares KV", _connector),
    Check("connector-waits", "with --decode-dispatch chunk or at-once, decode can wait", _waits),
    Check("same-store", "engines' connectors use the store that the router asks", _same_store),
    Check(
        "block-size",
        "blocks of engines of one model have as many tokens",
        partial(
            _agree,
            told=_block_size,
            what="blocks have",
            how="start all engines of a model with the same --block-size",
        ),
    ),
    Check(
        "block-hashes",
        "engines of one model name blocks by one algorithm and seed",
        partial(
            _agree,
            told=_hashes,
            what="blocks are named by",
            how="start all engines of a model with the same PYTHONHASHSEED (for `kvrouter sim`: "
            "--hash-seed) and with --prefix-caching-hash-algo sha256_cbor",
        ),
    ),
    Check(
        "kv-dtype",
        "KV of engines of one model has one data type",
        partial(
            _agree,
            told=_dtype,
            what="KV is",
            how="start all engines of a model with the same --kv-cache-dtype and --dtype",
        ),
    ),
    Check(
        "weights",
        "engines of one model have the same weights, revision and adapters",
        partial(
            _agree,
            told=_weights,
            what="the weights are",
            how="start all engines with the same --model and --revision (or `revision` in the "
            "connector's settings, where paths differ)",
        ),
    ),
    Check(
        "kv-layout",
        "KV of engines of one model has one shape: parts, layers, heads, bytes",
        partial(
            _agree,
            told=_layout,
            what="the parts of a block are",
            how="start all engines with one --tensor-parallel-size and attention backend, or give "
            'their connectors the same "parts", see docs/kv-layouts.md',
            unless=(_block_size, _dtype, _weights),
        ),
    ),
)
