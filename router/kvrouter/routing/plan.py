"""What routing decides upon (RouteInputs) and what it decides (Plan); arithmetic, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrouter.engines.engine import Engine


@dataclass(slots=True)
class RouteInputs:
    """One request as a policy sees it. Nobody changes it.

    Attributes:
        prompt_tokens: tokens of the prompt; an estimate unless `exact`.
        decode: engines that may decode it; never empty.
        prefill: engines that may prefill it; may be empty.
        exact: whether `prompt_tokens` was counted, not estimated from the text's length.
        block_tokens: tokens per block, or 0 where no engine told: then nothing can match.
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
