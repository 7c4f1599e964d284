"""What routing decides upon (RouteInputs) and what it decides (Plan); arithmetic, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvrouter.engine import Engine


@dataclass(slots=True)  # not frozen: that would triple what it costs to make one per request
class RouteInputs:
    """One request as a policy sees it. Nobody changes it.

    Attributes:
        prompt_tokens: tokens of the prompt; an estimate unless `exact`.
        decode: engines that may decode it; never empty.
        prefill: engines that may prefill it; may be empty.
        exact: whether `prompt_tokens` was counted, not estimated from the text's length.
        block_tokens: tokens per block, or 0 where no engine told: then nothing can match.
        hashes: its chain of 32-byte block hashes, or None where nobody asked for it.
        matches: leading blocks that an engine's own cache holds, by its KV events (absent: none).
        guesses: the same where the router only knows what it sent there, or has under way there:
            good enough to choose by, not to skip a prefill leg by, since the engine may have
            evicted them long ago, or not computed them yet.
        store_blocks: leading blocks that the store holds whole, by the hex digest of a manifest.
        prefill_threshold: the prefill leg is skipped where the decode engine has no more prompt
            tokens than this to compute, with those of other requests.
        split: whether it may have two legs at all (False: e.g. it asks for prompt logprobs).
        model: name of the model or adapter that it asks for; None: any.
    """

    prompt_tokens: int
    decode: Sequence[Engine]
    prefill: Sequence[Engine] = ()
    exact: bool = False
    block_tokens: int = 0
    hashes: bytes | None = None
    matches: Mapping[Engine, int] = field(default_factory=dict)
    guesses: Mapping[Engine, int] = field(default_factory=dict)
    store_blocks: Mapping[str, int] = field(default_factory=dict)
    prefill_threshold: int = 0
    split: bool = True
    model: str | None = None


@dataclass(slots=True)
class Plan:
    """Where the legs go. Nobody changes it.

    Attributes:
        prefill: engine of the prefill leg, or None: decode computes what is missing.
        decode: engine of the decode leg.
        missing_tokens: tokens that a prefill leg would spare the decode engine.
        why: the reason in a word or three, for the log line and a metric's label; from a
            bounded set: "prefill", "little missing", "no prefill engine", "not splittable",
            "families differ", "manifests differ", "adapters differ", "shares no KV",
            "same engine".
        prefill_tokens: tokens of the prompt that the prefill engine will compute; 0 without one.
    """

    prefill: Engine | None
    decode: Engine
    missing_tokens: int
    why: str
    prefill_tokens: int = 0


def without(
    inputs: RouteInputs,
    *,
    prefill: Sequence[Engine] | None = None,
    decode: Sequence[Engine] | None = None,
) -> RouteInputs:
    """The same request with other engines to choose from."""
    changes: dict[str, Sequence[Engine]] = {}
    if prefill is not None:
        changes["prefill"] = prefill
    if decode is not None:
        changes["decode"] = decode
    return replace(inputs, **changes)  # type: ignore[arg-type]


def loaders(decode: Sequence[Engine], family: str, manifest: str | None) -> Sequence[Engine]:
    """Those of `decode` that can load what was saved for `manifest`."""
    return [e for e in decode if e.manifest == manifest and e.family == family]


def held_tokens(inputs: RouteInputs, engine: Engine) -> tuple[int, int]:
    """Leading tokens of the prompt that `engine` holds itself, and that it holds or could load."""
    own = inputs.matches.get(engine, 0)
    manifest = engine.manifest
    stored = inputs.store_blocks.get(manifest, 0) if manifest is not None else 0
    usable = usable_blocks(inputs.prompt_tokens, inputs.block_tokens)
    own = min(own, usable)
    return own * inputs.block_tokens, min(max(own, stored), usable) * inputs.block_tokens


def computed_tokens(inputs: RouteInputs, prefill: Engine) -> int:
    """Tokens of the prompt that `prefill` computes: all but those that it holds or can load.

    Guesses count as held: this is the engine's load, and nothing is skipped by it.
    """
    if not (inputs.matches or inputs.guesses or inputs.store_blocks):
        return inputs.prompt_tokens
    guessed = min(
        inputs.guesses.get(prefill, 0), usable_blocks(inputs.prompt_tokens, inputs.block_tokens)
    )
    held = max(held_tokens(inputs, prefill)[1], guessed * inputs.block_tokens)
    return inputs.prompt_tokens - held


def usable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Blocks whose KV can be reused: an engine always computes at least the last token itself."""
    if block_tokens <= 0 or prompt_tokens <= 0:
        return 0
    return (prompt_tokens - 1) // block_tokens


def missing_tokens(inputs: RouteInputs, decode: Engine) -> int:
    """Tokens that a prefill leg would spare `decode`.

    Only whole blocks can be handed over, so an exact prompt of less than a block and a token
    misses nothing. An estimated size cannot rule a block out and counts whole.
    """
    block_tokens = inputs.block_tokens
    if not inputs.exact or not block_tokens:
        return inputs.prompt_tokens
    usable = (inputs.prompt_tokens - 1) // block_tokens
    if not inputs.matches and not inputs.store_blocks:
        return usable * block_tokens
    return usable * block_tokens - held_tokens(inputs, decode)[1]


def shares(prefill: Engine, decode: Engine) -> bool:
    """Whether KV of `prefill` is KV to `decode`: one family, and equal manifests or unknown ones.

    An engine whose connector refuses to share does so with nobody.
    """
    if prefill.family != decode.family:
        return False
    mine, theirs = prefill.identity, decode.identity
    if mine is None or theirs is None:
        return True
    if not (mine.pairs and theirs.pairs):
        return False
    if mine.refusal is not None or theirs.refusal is not None:
        return False
    return mine.manifest == theirs.manifest or None in (mine.manifest, theirs.manifest)


def partners(
    prefill: Sequence[Engine], decode: Engine, model: str | None = None
) -> Sequence[Engine]:
    """Those prefill engines of other servers whose KV of `model` `decode` can load."""
    server, adapter = decode.server, _adapter(decode, model)
    able = [
        e
        for e in prefill
        if e.server is not server and shares(e, decode) and _adapter(e, model) == adapter
    ]
    return prefill if len(able) == len(prefill) else able


def _adapter(engine: Engine, model: str | None) -> tuple[str, str] | None:
    """Name and path of the adapter that `engine` has under the name of `model`, if it is one.

    Engines do not compare adapters when they hand KV over: where one name stands for two paths, as
    while an adapter is replaced on one engine after the other, the KV would be another adapter's.
    """
    identity = engine.identity
    if model is None or identity is None or not identity.adapters:
        return None
    return identity.adapter(model)


def elsewhere(engines: Sequence[Engine], failed: Iterable[Engine]) -> Sequence[Engine]:
    """Those of `engines` on other servers than `failed`; all of them where there are none.

    Ranks of one server often fail together.
    """
    servers = {engine.server for engine in failed}
    return [engine for engine in engines if engine.server not in servers] or engines
