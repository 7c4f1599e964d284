"""Prompts that wait at the router until a prefill engine is about to be free. Pure, over a clock.

What is bound late is bound well: no leg waits on an engine, so that each free engine gets the
prompt that is worth most there at that time, and a slow engine gets fewer legs by itself.

- Order: the lowest `priority` of clients first, then the shortest. A prompt that waits gains
  `AGING` of its wait, so that none starves. One of a tenant that asks for more than its share
  counts as if it had come later (`_Shares`).
- An engine is open if it has no leg, if its leg ends within `HORIZON_S` (or within the time that
  the next prompt takes to fetch KV), or while all its legs are short (`SHORT_TOKENS`): one leg for
  each engine costs short prompts 43 % of the throughput. It is closed to all that come behind a
  prompt that waits for it: short ones without end would keep it from a long one.
- A prompt goes to a decode engine alone if that computes for at most `SHORT_PAUSE_S` then, or if it
  is sooner there; each second that streams pause for it counts, weighed by `stall_weight`, and in
  pauses beyond `USUAL_PAUSE_S` by the cube of their length too. One weight for all would be too
  much for usual prompts (0.57 s instead of 0.53 in conversations) or too little for a few tokens
  behind 100,000 (pauses of 0.39 s).

Tried: the highest response ratio as the order (in bursts old long prompts hold the queue, all
others go to decode engines, and streams drown); one leg that waits on each engine (10 to 46 %
later); service times learnt for each engine (better beside a slow one, worse elsewhere).
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import exp, inf, log
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from kvrouter.engines.engine import Engine, Role
from kvrouter.prefix.lower import NOTHING
from kvrouter.routing.plan import (
    AGING,
    TOKENS_PER_MS,
    Plan,
    RouteInputs,
    Why,
    usable_blocks,
    work_ms,
)
from kvrouter.routing.policies.base import decide, in_turn
from kvrouter.routing.policies.prefix import LOAD_COST, believed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvrouter.routing.policies.planner import Planner

HORIZON_S: Final = 0.02  # a leg is sent so long before its engine is free: it travels meanwhile
SHORT_TOKENS: Final = 2048
"""Tokens of prompts that may be under way on an engine, however many legs they are."""
SHORT_PAUSE_S: Final = 0.075
"""What streams may lose without reckoning. A limit in tokens (2,048) is the same on a fast engine;
where that many take 0.2 s beside 20 streams, answers take 1.4 times as long as with `prefix`."""
USUAL_PAUSE_S: Final = 0.1
"""Of streams, while their engine computes up to `SHORT_TOKENS` of a prompt in one step."""
MOST_LOCAL_S: Final = 1.0  # longest computation of a prompt beside streams
HEDGE: Final = 0.3
"""An engine that takes longer than estimated is taken to need this part of its time again."""
PRICE_OF_WORK: Final = 1.5
"""Of a second of computation, against one of waiting: another prompt could use it."""
BEHIND_WEIGHT: Final = 0.3  # of a second by which a prompt delays each one that waits behind it
IDLE_S: Final = 0.03
"""After which an engine takes prompts of any router, not only of the one whose home it is."""
HOME_S: Final = 1.0
"""After which a prompt goes to any engine: a router may have no home, or one that is never idle."""
PACE_STEP: Final = 0.05  # of the error of an estimate, towards what legs take
LOOK_AHEAD: Final = 8
"""Prompts of a model that are looked at in vain before the rest is left for the next time."""
TOKENS_PER_S: Final = 1000 * TOKENS_PER_MS
LEAST_WAIT_S: Final = 0.001
MOST_ABSENT: Final = 4096
"""Tenants without a waiting prompt that are remembered; beyond that all of them are forgotten."""
OVERHEAD_S: Final = 0.005  # of a prefill leg, whatever its length


def prefill_s(computed_tokens: int, held_tokens: int) -> float:
    """Rough seconds to compute so many tokens after `held_tokens`."""
    return OVERHEAD_S + work_ms(computed_tokens, held_tokens) / 1000


def load_s(tokens: float) -> float:
    """Rough seconds to load the KV of so many tokens from the store."""
    return LOAD_COST * tokens / TOKENS_PER_MS / 1000 if tokens > 0 else 0.0


@dataclass(slots=True, eq=False)
class QueuedPrompt:
    """A prompt in the queue; `bind` is called once, with its plan, within `PrefillQueue.plan`."""

    inputs: RouteInputs
    bind: Callable[[Plan], None]
    arrived_s: float  # on the queue's clock; for a second try that of the first
    tenant: str = ""
    priority: int = 0  # of the client: lower goes first
    estimate: Callable[[int, int], float] = prefill_s  # simulations bring wrong ones
    work_s: float = 0.0  # where it takes least
    key: tuple[int, float] = (0, 0.0)


class Option(NamedTuple):
    """An engine that would compute a prompt, alone on it; seconds."""

    engine: Engine
    lead_s: float  # that it takes to load what the store or its lower tiers have, and it lacks
    work_s: float  # that it takes to compute the rest
    computed_tokens: int


class _Costs:
    """What a prompt costs on each engine; `held` are the leading blocks that it has itself."""

    __slots__ = ("_held", "_inputs", "_pace", "_prompt", "_usable", "_usual")

    def __init__(
        self, prompt: QueuedPrompt, inputs: RouteInputs, held: Mapping[Engine, int], pace: float
    ) -> None:
        self._prompt, self._inputs, self._held, self._pace = prompt, inputs, held, pace
        self._usable = usable_blocks(inputs.prompt_tokens, inputs.block_tokens)
        self._usual: dict[str | None, tuple[float, float, int]] = {}

    def of(self, engine: Engine) -> Option:
        """Its cost on `engine`."""
        return Option(engine, *self.parts(engine))

    def parts(self, engine: Engine) -> tuple[float, float, int]:
        """The parts of that. All that hold nothing of it differ only in their manifests."""
        own, manifest = self._held.get(engine, 0), engine.manifest
        loads = self._inputs.lower.get(engine, NOTHING)
        if loads.blocks > own:
            lead_s, work_s, computed = self._cost(min(loads.blocks, self._usable), manifest)
            load_s = self._pace * loads.cost * self._inputs.block_tokens / TOKENS_PER_S
            return lead_s + load_s, work_s, computed
        if own:
            return self._cost(min(own, self._usable), manifest)
        usual = self._usual.get(manifest)
        if usual is None:
            usual = self._usual[manifest] = self._cost(0, manifest)
        return usual

    def _cost(self, own: int, manifest: str | None) -> tuple[float, float, int]:
        inputs, pace = self._inputs, self._pace
        stored = min(inputs.store_blocks.get(manifest or "", 0), self._usable)
        lead_s = pace * load_s((stored - own) * inputs.block_tokens)
        if own and own <= stored:  # the same to compute, and less to load
            usual = self._usual.get(manifest) or self._cost(0, manifest)
            return lead_s, *usual[1:]
        held_tokens = max(own, stored) * inputs.block_tokens
        computed = inputs.prompt_tokens - held_tokens
        return lead_s, pace * self._prompt.estimate(computed, held_tokens), computed


class _Rests(dict[Engine, float]):
    """Seconds until each engine has done its legs, and those bound or kept for it meanwhile."""

    def __init__(self, now_s: float) -> None:
        super().__init__()
        self.now_s = now_s
        self.kept: set[Engine] = set()  # for a prompt that waits, from those behind it

    def __missing__(self, engine: Engine) -> float:
        self[engine] = rest = rest_s(engine, self.now_s)
        return rest


def rest_s(engine: Engine, now_s: float) -> float:
    """Estimated seconds until `engine` has done its prefill legs."""
    load = engine.prefilling
    if not load.legs:
        return 0.0
    ran_s = now_s - load.since_s
    return max(load.work_s - ran_s, HEDGE * ran_s)


class _Shares:
    """When prompts count as come: start-time fair queuing (Goyal, Vin and Cheng, 1996).

    A tenant that asks for no more than its share of the engines counts by its arrivals. The
    prompts of one that asks for more count as if they had come one after the other, each once its
    share has done the one before.
    """

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()

    def enter(self, prompt: QueuedPrompt, engines: int) -> float:
        """`prompt` begins to wait for one of so many engines; when it counts as come."""
        self._waiting[prompt.tenant] += 1
        if len(self._until_s) > len(self._waiting) + MOST_ABSENT:
            self._until_s = {t: s for t, s in self._until_s.items() if t in self._waiting}
        since_s = max(prompt.arrived_s, self._until_s.get(prompt.tenant, -inf))
        share = max(engines, 1) / len(self._waiting)
        self._until_s[prompt.tenant] = since_s + prompt.work_s / share
        return since_s

    def leave(self, prompt: QueuedPrompt) -> None:
        """`prompt` waits no longer. Once nobody waits, nobody owes anything."""
        self._waiting[prompt.tenant] -= 1
        if not self._waiting[prompt.tenant]:
            del self._waiting[prompt.tenant]
        if not self._waiting:
            self._until_s.clear()


_KEY: Final = attrgetter("key")


@dataclass(eq=False)
class PrefillQueue:
    """All prompts of a router that wait for a prefill engine, of any model.

    Its owner calls `plan` after each `submit` and `withdraw`, when an engine's load fell, when
    engines joined or left, and at the time that the last `plan` named.
    """

    engines: Callable[[Role, str | None], Sequence[Engine]]  # those that may be used now
    policy: Planner  # chooses decode engines
    stall_weight: float | None  # None: only `prefill_threshold` spares prompts their leg
    clock: Callable[[], float] = time.monotonic  # that of the engine pool
    is_home: Callable[[Engine], bool] | None = None  # whether it is ours first; None: all are
    waiting: list[QueuedPrompt] = field(default_factory=list, init=False)  # in order
    stalled_s: float = field(default=0.0, init=False)  # of all streams, by prompts beside them
    _shares: _Shares = field(default_factory=_Shares, init=False)
    _pace: dict[str | None, float] = field(default_factory=dict, init=False)
    _turn: int = field(default=0, init=False)

    def submit(self, prompt: QueuedPrompt) -> None:
        """`prompt` waits until `plan` binds it; its owner may `withdraw` it before."""
        inputs = prompt.inputs
        lower = (loads.blocks for loads in inputs.lower.values())
        held = max((*believed(inputs).values(), *lower), default=0)
        stored = max(inputs.store_blocks.values(), default=0)
        usable = usable_blocks(inputs.prompt_tokens, inputs.block_tokens)
        tokens = min(max(held, stored), usable) * inputs.block_tokens
        estimate_s = prompt.estimate(inputs.prompt_tokens - tokens, tokens)
        prompt.work_s = self.pace(inputs.model) * estimate_s
        come_s = self._shares.enter(prompt, len(inputs.prefill))
        prompt.key = prompt.priority, prompt.work_s + AGING * come_s
        insort(self.waiting, prompt, key=_KEY)

    def withdraw(self, prompt: QueuedPrompt) -> bool:
        """`prompt` waits no longer. Returns whether it did: others may go then."""
        waited = prompt in self.waiting
        if waited:
            self.waiting.remove(prompt)
            self._shares.leave(prompt)
        return waited

    def pace(self, model: str | None) -> float:
        """What estimates for `model` are multiplied by."""
        return self._pace.get(model, 1.0)

    def learn(self, model: str | None, tokens: int, estimated_s: float, took_s: float) -> None:
        """A prefill leg of `tokens` that was alone on its engine took so long.

        One pace for all engines of a model. Late binding gives slow ones fewer legs.
        """
        if tokens > SHORT_TOKENS and estimated_s > 0 and took_s > 0:
            wrong = max(-1.0, min(1.0, log(took_s / estimated_s)))
            self._pace[model] = self.pace(model) * exp(PACE_STEP * wrong)

    def wait_s(self, model: str | None = None) -> float:
        """Seconds of work that wait, for each engine: of `model`, or of all."""
        found = [p for p in self.waiting if model is None or p.inputs.model == model]
        engines = len({e for p in found for e in p.inputs.prefill})
        return sum(p.work_s for p in found) / max(engines, 1)

    def plan(self) -> float | None:
        """Bind all prompts whose time has come; returns when to look again, if it is known."""
        if not self.waiting:
            return None
        rests, ring_s = _Rests(self.clock()), inf
        in_vain: Counter[str | None] = Counter()
        for prompt in tuple(self.waiting):
            model = prompt.inputs.model
            if in_vain[model] >= LOOK_AHEAD:
                continue
            plan, ring = self._place(prompt, rests)
            if plan is not None:
                self.withdraw(prompt)
                if plan.prefill is None:
                    self.stalled_s += plan.work_s * plan.decode.requests
                prompt.bind(plan)
            else:
                in_vain[model] += 1
                ring_s = min(ring_s, ring)
        return max(ring_s, rests.now_s + LEAST_WAIT_S) if ring_s < inf else None

    def _place(self, prompt: QueuedPrompt, rests: _Rests) -> tuple[Plan | None, float]:
        """The plan of `prompt`, if it goes now; else when its engine may be open."""
        inputs = self._current(prompt)
        costs = _Costs(prompt, inputs, believed(inputs), self.pace(inputs.model))
        waited_s = rests.now_s - prompt.arrived_s
        found: list[Option] = []

        def choose(able: Sequence[Engine]) -> Engine:
            found.append(self._soonest(inputs, able, costs, rests))
            return found[0].engine

        plan = decide(inputs, self.policy.choice(inputs)(inputs.decode), choose)
        if plan.prefill is None:
            beside = self._beside_streams(prompt, inputs).of(plan.decode)
            predicted_s = waited_s + self._ready_s(beside, inputs)
            return replace(plan, work_s=beside.work_s, predicted_s=predicted_s), 0.0
        option = found[0]
        finish_s = max(rests[option.engine], option.lead_s) + option.work_s
        alone = self._alone(prompt, inputs, option, finish_s)
        if alone is not None:
            return replace(alone, predicted_s=waited_s + alone.predicted_s), 0.0
        ring_s = self._opens_s(option, rests, waited_s)
        busy_s = finish_s - rests[option.engine]
        rests[option.engine] = finish_s
        if ring_s > rests.now_s:
            rests.kept.add(option.engine)
            return None, ring_s
        return replace(plan, work_s=busy_s, predicted_s=waited_s + finish_s), 0.0

    def _current(self, prompt: QueuedPrompt) -> RouteInputs:
        """Its inputs, with the engines that may be used now.

        Without any decode engine those that were there: its decode leg will wait for others.
        """
        inputs = prompt.inputs
        decode = self.engines(Role.DECODE, inputs.model) or inputs.decode
        prefill = self.engines(Role.PREFILL, inputs.model)
        if decode is not inputs.decode or prefill is not inputs.prefill:
            inputs = prompt.inputs = replace(inputs, decode=decode, prefill=prefill)
        return inputs

    def _soonest(
        self, inputs: RouteInputs, able: Sequence[Engine], costs: _Costs, rests: _Rests
    ) -> Option:
        """The engine of the least price. Those that hold nothing differ only in their legs."""
        self._turn += 1
        able, held = in_turn(able, self._turn), believed(inputs).keys() | inputs.lower.keys()
        best = costs.of(min(able, key=rests.__getitem__))
        if not held:
            return best
        least_s = max(rests[best.engine], best.lead_s) + PRICE_OF_WORK * best.work_s
        for engine in able:
            if engine in held:
                lead_s, work_s, _ = costs.parts(engine)
                price_s = max(rests[engine], lead_s) + PRICE_OF_WORK * work_s
                if price_s < least_s:
                    best, least_s = costs.of(engine), price_s
        return best

    def _opens_s(self, option: Option, rests: _Rests, waited_s: float) -> float:
        """When the engine of `option` may take it, on the clock; at most now: now."""
        load, now_s = option.engine.prefilling, rests.now_s
        if waited_s < HOME_S and self.is_home is not None and not self.is_home(option.engine):
            ours_s = now_s + HOME_S - waited_s
            return ours_s if load.legs else min(ours_s, max(now_s, load.since_s + IDLE_S))
        if not load.legs:
            return now_s
        kept = option.engine in rests.kept
        if not kept and load.tokens + option.computed_tokens <= SHORT_TOKENS:
            return now_s
        if kept or load.legs > 1:
            return inf  # the end of a leg is an event
        rest = rest_s(option.engine, now_s)
        ahead_s = max(HORIZON_S, option.lead_s)
        return now_s if rest <= ahead_s else now_s + rest - ahead_s

    def _alone(
        self, prompt: QueuedPrompt, inputs: RouteInputs, option: Option, finish_s: float
    ) -> Plan | None:
        """The plan without a prefill leg, if a decode engine has the answer begun sooner.

        What streams lose speaks for the leg, unless it is short; what those lose that wait behind
        it, against it.
        """
        if self.stall_weight is None:
            return None
        costs = self._beside_streams(prompt, inputs)
        best, least = None, (True, inf)
        for engine in inputs.decode:
            lead_s, work_s, computed = costs.parts(engine)
            if work_s > MOST_LOCAL_S:
                continue
            computes_s = self._computing_s(engine, inputs) + work_s
            price_s, pauses = lead_s + computes_s, computes_s > SHORT_PAUSE_S
            if pauses:
                pause_s = work_s * min(1.0, SHORT_TOKENS / max(computed, 1))
                longer = max(1.0, pause_s / USUAL_PAUSE_S)
                price_s += self.stall_weight * longer**3 * engine.requests * work_s
            whole = engine.identity is None or engine.identity.can_serve_whole
            if (pauses, price_s) < least and whole:
                best, least = engine, (pauses, price_s)
        if best is None:
            return None
        waiting = len(self.waiting) / max(len(inputs.prefill), 1)
        behind_s = BEHIND_WEIGHT * waiting * option.work_s
        held = max(map(inputs.matches.get, inputs.decode, repeat(0)), default=0)
        load_all_s = self.pace(inputs.model) * load_s(
            inputs.prompt_tokens - held * inputs.block_tokens
        )
        pauses, least_s = least
        if pauses and least_s > finish_s + behind_s + load_all_s:
            return None
        beside = costs.of(best)
        missing, ready_s = beside.computed_tokens, self._ready_s(beside, inputs)
        return Plan(None, best, missing, Why.SOONER, missing, beside.work_s, ready_s)

    def _beside_streams(self, prompt: QueuedPrompt, inputs: RouteInputs) -> _Costs:
        """What `prompt` costs on decode engines: what they may still get does not count."""
        return _Costs(prompt, inputs, inputs.matches, self.pace(inputs.model))

    def _ready_s(self, beside: Option, inputs: RouteInputs) -> float:
        """Seconds until a decode engine has the prompt computed, after those it computes now."""
        return self._computing_s(beside.engine, inputs) + beside.lead_s + beside.work_s

    def _computing_s(self, engine: Engine, inputs: RouteInputs) -> float:
        """Seconds for which a decode engine will compute the prompts that it has."""
        return self.pace(inputs.model) * engine.computing_tokens / TOKENS_PER_S
