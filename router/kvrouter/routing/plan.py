"""Input (RouteInputs) and result (Plan) of routing policies, and what a plan means for engines.

Its legs count as load from the plan on (LegReservations), and prefill legs have a rank
(PrefillPriorities). Arithmetic and counts; no I/O.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families import uses_store
from kvrouter.openai.request import Request, priority
from kvrouter.prefix.in_flight import InFlightPrefixes, marks_of
from kvrouter.prefix.lower import NOTHING
from kvrouter.routing.rendezvous import in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvrouter.engines.pool import EnginePool, Ticket
    from kvrouter.prefix.lower import Loadable

TOKENS_PER_MS: Final = 10.0
"""Prompt tokens that an engine computes in a millisecond without attention. Only the order of legs
and their aging depend on it."""
LONG_CONTEXT_TOKENS: Final = 32768
"""Context at which attention costs as much as all else (8B: about 30,000)."""
AGING: Final = 0.1
"""Milliseconds of work that a millisecond of waiting is worth: only legs that come within 10 W ms
can overtake a leg of W ms, so that a long prompt does not wait for ever."""
STRIDE: Final = 1 << 40  # between two priorities of clients; more than any leg's own
MAX_GIVEN: Final = 1 << 22
"""Engines take 64 bits; larger priorities of clients are passed on as they are."""
Mode = Literal["auto", "on", "off"]


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
    lower: Mapping[Engine, Loadable] = field(default_factory=dict)
    """The same with what it can load from its own host memory or storage, and the cost of that."""
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


def chosen_by(inputs: RouteInputs, engine: Engine) -> str:
    """What speaks for a decode engine that a policy chose, for a metric's label.

    "exact", "learnt": it holds a beginning of the prompt, by its events or by a guess. "session":
    nobody does, and the session has its place. "load": nothing else.
    """
    if engine in inputs.matches or engine in inputs.lower:
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


def held_tokens(inputs: RouteInputs, engine: Engine, guessed_blocks: int = 0) -> int:
    """Leading tokens of the prompt that `engine` holds, could load, or is guessed to hold."""
    usable = usable_blocks(inputs.prompt_tokens, inputs.block_tokens)
    stored = inputs.store_blocks.get(engine.manifest or "", 0)
    own, lower = inputs.matches.get(engine, 0), inputs.lower.get(engine, NOTHING)
    return min(max(own, lower.blocks, stored, guessed_blocks), usable) * inputs.block_tokens


def computed_tokens(inputs: RouteInputs, engine: Engine) -> int:
    """Tokens of the prompt that `engine` would have to compute; guesses count as held."""
    return inputs.prompt_tokens - held_tokens(inputs, engine, inputs.guesses.get(engine, 0))


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
    usable = usable_blocks(inputs.prompt_tokens, block_tokens)
    return usable * block_tokens - held_tokens(inputs, decode)


def work_ms(computed_tokens: int, held_tokens: int) -> float:
    """Rough time to compute so many tokens after `held_tokens`, in milliseconds."""
    context = held_tokens + computed_tokens / 2
    return computed_tokens * (1 + context / LONG_CONTEXT_TOKENS) / TOKENS_PER_MS


class PrefillPriorities:
    """The `priority` of prefill legs: engines that schedule by it begin with the shortest.

    vLLM with `--scheduling-policy priority` begins with the lowest `priority`, among equals with
    the first that came (vllm/v1/core/sched/request_queue.py). Otherwise its V1 engine ignores it,
    and its V0 engine refuses it with 400, which detection finds out.

    Ranks legs in the same way on all routers: `clock` is Unix time. Mode "auto": for engines that
    took a priority when they joined; "on": for all.
    """

    def __init__(self, mode: Mode, clock: Callable[[], float] = time.time) -> None:
        self._mode = mode
        self._clock = clock

    def of(self, request: Request, engine: Engine, computed_tokens: int) -> int | None:
        """The `priority` of a leg on `engine`: the client's first, then work and age.

        None: the client's is passed on. ApiError 400: the client's is no integer.
        """
        identity = engine.identity
        if self._mode == "off" or identity is None:
            return None
        if self._mode == "auto" and not identity.takes_priority:
            return None
        given = priority(request) if "priority" in request.spans else 0
        if abs(given) > MAX_GIVEN:
            return None
        work = work_ms(computed_tokens, request.prompt_tokens - computed_tokens)
        own = int(work + AGING * 1000 * self._clock())
        return given * STRIDE + min(own, STRIDE - 1)


class LegReservations:
    """Load of one prompt's legs on engines, at most one reservation per leg, from the plan on.

    A decode leg is sent long after its engine was chosen. Plans made meanwhile must see its load,
    and which blocks the engines of both legs will hold. The owner must call `release` in the end.

    `hashes` are those of the prompt's blocks, 32 bytes each; None: unknown.
    """

    __slots__ = ("_in_flight", "_marks", "_pool", "_tickets")

    def __init__(self, pool: EnginePool, in_flight: InFlightPrefixes, hashes: bytes | None) -> None:
        self._pool = pool
        self._in_flight = in_flight
        self._marks = marks_of(hashes) if hashes else ()
        self._tickets: list[Ticket | None] = [None, None]

    def plan(
        self, leg: Role, engine: Engine, tokens: int, computing_tokens: int = 0, work_s: float = 0
    ) -> Ticket:
        """Count `leg` (PREFILL or DECODE) on `engine` from now on, and no longer where it was.

        A prefill leg is estimated to take `work_s`. Returns its ticket, which this object owns.
        """
        held = self._tickets[leg is Role.DECODE]
        if held is not None:
            same = held.tokens == tokens and held.computing_tokens == computing_tokens
            if held.engine is engine and same:
                return held
            self.end(leg)
        self._tickets[leg is Role.DECODE] = ticket = self._pool.reserve(
            engine,
            tokens,
            begun=False,
            computing_tokens=computing_tokens,
            prefill=leg is Role.PREFILL,
            work_s=work_s,
        )
        self._in_flight.add(engine, self._marks)
        return ticket

    def begin(self, leg: Role, engine: Engine, tokens: int, computing_tokens: int = 0) -> None:
        """The same for a leg that is sent now: it is in flight until it leaves."""
        self.plan(leg, engine, tokens, computing_tokens).begin()

    def tokens(self, leg: Role) -> int:
        """The load of `leg`; 0 without a reservation."""
        ticket = self._tickets[leg is Role.DECODE]
        return ticket.tokens if ticket is not None else 0

    def computed(self) -> None:
        """The answer has begun: the prompt is computed. Idempotent."""
        for ticket in self._tickets:
            if ticket is not None:
                ticket.computed()

    def end(self, leg: Role) -> None:
        """`leg` has ended, or there will be none. Idempotent."""
        at = leg is Role.DECODE
        ticket, self._tickets[at] = self._tickets[at], None
        if ticket is not None:
            self._in_flight.remove(ticket.engine, self._marks)
            ticket.release()

    def release(self) -> None:
        """Both legs have ended. Idempotent."""
        self.end(Role.PREFILL)
        self.end(Role.DECODE)
