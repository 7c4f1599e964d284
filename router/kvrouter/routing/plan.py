"""Input (RouteInputs) and result (Plan) of routing policies; arithmetic, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvrouter.engines.families import uses_store
from kvrouter.routing.rendezvous import in_order

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvrouter.engines.engine import Engine


@dataclass(slots=True)
class RouteInputs:
    """One request as a policy sees it. Policies must not change it."""

    prompt_tokens: int  # an estimate from the text's length unless `exact`
    decode: Sequence[Engine]  # engines that may decode it; never empty
    prefill: Sequence[Engine] = ()  # engines that may prefill it
    exact: bool = False
    block_tokens: int = 0  # 0: unknown, and nothing can match
    matches: Mapping[Engine, int] = field(default_factory=dict)
    """Leading blocks that an engine's own cache holds, by its KV events."""
    guesses: Mapping[Engine, int] = field(default_factory=dict)
    """Leading blocks that the router sent to an engine or has in flight there. They may be evicted,
    or not computed yet: no reason to skip a prefill leg."""
    learnt: bool = False  # guesses are of pieces of text: nobody tells the names of blocks
    session: bytes | None = None  # what all turns of its session share, then
    store_blocks: Mapping[str, int] = field(default_factory=dict)
    """Leading blocks that the store holds whole, by the hex digest of a manifest."""
    prefill_threshold: int = 0
    """The prefill leg is skipped if the decode engine has no more prompt tokens than this to
    compute, with those of other requests."""
    away: Collection[str] = ()  # URLs of store nodes that are not connected, if there are several
    split: bool = True  # whether it may have two legs (False: e.g. it asks for prompt logprobs)
    model: str | None = None  # the requested model or adapter; None: any


class Why(StrEnum):
    """Why a prompt has a prefill leg, or none: for log lines and the label of a metric."""

    PREFILL = "prefill"
    LITTLE_MISSING = "little missing"
    SOONER = "sooner"
    NO_PREFILL_ENGINE = "no prefill engine"
    NOT_SPLITTABLE = "not splittable"
    NOT_RENDERED = "not rendered"
    REFUSED = "refused"
    SHARES_NO_KV = "shares no KV"
    FAMILIES_DIFFER = "families differ"
    MANIFESTS_DIFFER = "manifests differ"
    ADAPTERS_DIFFER = "adapters differ"
    SAME_ENGINE = "same engine"


@dataclass(slots=True)
class Plan:
    """Where the legs go. A change makes a new one (`dataclasses.replace`)."""

    prefill: Engine | None  # None: decode computes what is missing
    decode: Engine
    missing_tokens: int  # those that a prefill leg would spare the decode engine
    why: Why
    computed_tokens: int = 0  # those that the engine which computes the prompt will compute
    work_s: float = 0.0  # that the engine which computes the prompt may take; 0: not estimated
    predicted_s: float = 0.0  # from its arrival until the prompt is computed; 0: not predicted

    @property
    def lacks_prefill(self) -> bool:
        """Whether the prompt would have a prefill leg if an engine were there to do it."""
        return self.why is Why.NO_PREFILL_ENGINE


def chosen_by(inputs: RouteInputs, engine: Engine) -> str:
    """What speaks for a decode engine that a policy chose, for a metric's label.

    "exact", "learnt": it holds a beginning of the prompt, by its events or by a guess. "session":
    nobody does, and the session has its place. "load": nothing else.
    """
    if engine in inputs.matches:
        return "exact"
    if engine in inputs.guesses:
        return "learnt"
    if inputs.session is None or len(inputs.decode) == 1:
        return "load"
    unknown = inputs.guesses.keys().isdisjoint(inputs.decode)
    return "session" if unknown and in_order(inputs.session, inputs.decode)[0] is engine else "load"


def loaders(decode: Sequence[Engine], family: str, manifest: str | None) -> Sequence[Engine]:
    """Engines that can load what was saved for `manifest`."""
    return [e for e in decode if e.manifest == manifest and e.family == family]


def cut_off(inputs: RouteInputs, engine: Engine) -> bool:
    """Whether `engine` can put no KV into the store: its node is away."""
    return uses_store(engine.family) and engine.node in inputs.away


def held_tokens(inputs: RouteInputs, engine: Engine) -> tuple[int, int]:
    """Leading tokens of the prompt that `engine` holds, and that it holds or could load."""
    usable = usable_blocks(inputs.prompt_tokens, inputs.block_tokens)
    own = min(inputs.matches.get(engine, 0), usable)
    stored = inputs.store_blocks.get(engine.manifest or "", 0)
    return own * inputs.block_tokens, min(max(own, stored), usable) * inputs.block_tokens


def computed_tokens(inputs: RouteInputs, engine: Engine) -> int:
    """Tokens of the prompt that `engine` would have to compute; guesses count as held."""
    if not (inputs.matches or inputs.guesses or inputs.store_blocks):
        return inputs.prompt_tokens
    guessed = min(
        inputs.guesses.get(engine, 0), usable_blocks(inputs.prompt_tokens, inputs.block_tokens)
    )
    held = max(held_tokens(inputs, engine)[1], guessed * inputs.block_tokens)
    return inputs.prompt_tokens - held


def usable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Blocks whose KV can be reused: an engine always computes at least the last token."""
    if block_tokens <= 0 or prompt_tokens <= 0:
        return 0
    return (prompt_tokens - 1) // block_tokens


def missing_tokens(inputs: RouteInputs, decode: Engine) -> int:
    """Tokens that a prefill leg would spare `decode`.

    Only whole blocks can be handed over, so an exact prompt of at most one block misses nothing. An
    estimated size counts whole.
    """
    block_tokens = inputs.block_tokens
    if not inputs.exact or not block_tokens:
        return inputs.prompt_tokens
    usable = (inputs.prompt_tokens - 1) // block_tokens
    if not inputs.matches and not inputs.store_blocks:
        return usable * block_tokens
    return usable * block_tokens - held_tokens(inputs, decode)[1]
