"""Prompts wait at the router, and are bound when a prefill engine is about to be free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.prefix.in_flight import InFlightPrefixes
from kvrouter.prefix.lower import Loadable
from kvrouter.routing.plan import AGING, LegReservations, Plan, RouteInputs, Why
from kvrouter.routing.planner.queue import (
    HORIZON_S,
    IDLE_S,
    PrefillQueue,
    QueuedPrompt,
    load_s,
    prefill_s,
)
from kvrouter.routing.policies.planner import Planner

LONG = 20_000
IDENTITY = Identity(("m",), block_tokens=16, manifest="x")


@dataclass
class Bench:
    """A queue before so many engines, and the legs that it bound."""

    prefill: int = 1
    decode: int = 1
    stall_weight: float | None = None  # decode engines compute nothing by themselves
    threshold: int = 0
    now_s: float = 100.0
    bound: list[tuple[str, Plan]] = field(default_factory=list)
    legs: dict[str, LegReservations] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = EnginePool(lambda: self.now_s)
        self.queue = PrefillQueue(
            self.pool.engines,
            Planner(),
            stall_weight=self.stall_weight,
            clock=lambda: self.now_s,
        )
        roles = [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode
        self.engines = [self.pool.add(f"e:{port}", role) for port, role in enumerate(roles, 1)]
        for engine in self.engines:
            self.pool.join(engine, IDENTITY)
        for engine in self.engines[self.prefill :]:
            for _ in range(8):  # streams
                self.pool.reserve(engine, 1)

    def submit(
        self,
        name: str,
        tokens: int,
        tenant: str = "",
        priority: int = 0,
        stored: int = 0,
        *,
        lower: Mapping[Engine, Loadable] = MappingProxyType({}),
    ) -> QueuedPrompt:
        inputs = RouteInputs(
            prompt_tokens=tokens,
            decode=self.pool.engines(Role.DECODE, "m"),
            prefill=self.pool.engines(Role.PREFILL, "m"),
            exact=True,
            block_tokens=16,
            store_blocks={"x": stored // 16},
            lower=lower,
            prefill_threshold=self.threshold,
            model="m",
        )
        prompt = QueuedPrompt(
            inputs, lambda plan: self.bind(name, plan), self.now_s, tenant, priority
        )
        self.queue.submit(prompt)
        return prompt

    def bind(self, name: str, plan: Plan) -> None:
        self.bound.append((name, plan))
        legs = self.legs[name] = LegReservations(self.pool, InFlightPrefixes(lambda: 5000), None)
        if plan.prefill is not None:
            legs.plan(Role.PREFILL, plan.prefill, plan.computed_tokens, work_s=plan.work_s)
        legs.plan(Role.DECODE, plan.decode, 1, 0 if plan.prefill else plan.computed_tokens)

    def end(self, name: str) -> None:
        self.legs.pop(name).release()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.bound]


def test_what_streams_lose_to_prompts_beside_them_is_counted() -> None:
    bench = Bench(threshold=2048)
    bench.submit("a", 2000)
    bench.queue.plan()
    plan = bench.bound[0][1]
    assert (plan.prefill, plan.work_s) == (None, prefill_s(2000, 0))
    assert bench.queue.stalled_s == pytest.approx(8 * plan.work_s)  # of eight streams
    assert plan.predicted_s == pytest.approx(plan.work_s)
    bench.submit("b", 40)
    bench.queue.plan()
    after_a = plan.work_s + prefill_s(40, 0)
    assert bench.bound[1][1].predicted_s == pytest.approx(after_a, abs=0.02)


def test_an_idle_engine_takes_a_prompt_at_once() -> None:
    bench = Bench()
    bench.submit("a", LONG)
    assert bench.queue.plan() is None
    assert bench.names == ["a"]
    assert bench.engines[0].prefilling.work_s == pytest.approx(prefill_s(LONG, 0))


def test_no_long_prompt_waits_on_an_engine() -> None:
    bench = Bench()
    bench.submit("a", LONG)
    bench.submit("b", LONG)
    while (ring_s := bench.queue.plan()) is not None and ring_s < 100 + prefill_s(LONG, 0):
        bench.now_s = ring_s
    assert bench.names == ["a"]
    bench.end("a")
    bench.queue.plan()
    assert bench.names == ["a", "b"]


def test_a_leg_is_sent_before_its_engine_is_free_by_the_time_that_it_loads() -> None:
    bench = Bench()
    bench.submit("a", 3000)
    bench.queue.plan()
    bench.submit("b", 50_000, stored=47_000)
    while "b" not in bench.names:
        ring_s = bench.queue.plan()
        assert ring_s is not None or "b" in bench.names
        bench.now_s = ring_s or bench.now_s
    assert HORIZON_S < 100 + prefill_s(3000, 0) - bench.now_s < load_s(47_000)


def test_a_prompt_goes_where_loading_it_from_host_memory_takes_less_than_computing_it() -> None:
    bench = Bench(prefill=3)
    _, holder, loader, _ = bench.engines
    blocks = LONG // 16 - 1
    lower = {loader: Loadable(blocks, 0.2 * blocks), holder: Loadable(blocks // 2, 0.1 * blocks)}
    bench.submit("a", LONG, lower=lower)
    bench.submit("b", LONG, lower=lower)
    bench.queue.plan()
    (_, first), (_, second) = bench.bound
    load_s = 0.2 * 16 * blocks / 10_000
    assert (first.prefill, second.prefill) == (loader, loader)
    assert first.computed_tokens == LONG - 16 * blocks
    assert first.work_s == pytest.approx(load_s + prefill_s(32, LONG - 32), rel=0.01)


def test_an_engine_that_takes_longer_than_estimated_gets_nothing_more() -> None:
    bench = Bench()
    bench.submit("a", LONG)
    bench.queue.plan()
    bench.submit("b", LONG)
    bench.now_s += 10 * prefill_s(LONG, 0)
    ring_s = bench.queue.plan()
    assert bench.names == ["a"]
    assert ring_s is not None
    assert ring_s > bench.now_s + prefill_s(LONG, 0)
    bench.end("a")
    bench.queue.plan()
    assert bench.names == ["a", "b"]


def test_the_shortest_goes_first_until_a_long_one_has_waited_ten_times_its_work() -> None:
    bench = Bench()
    bench.submit("running", LONG)
    bench.queue.plan()
    bench.submit("long", LONG)
    bench.submit("short", 5000)
    bench.now_s += 11 * prefill_s(LONG, 0)
    bench.submit("late", 5000)
    for name in ("running", "short", "long"):
        bench.end(name)
        bench.queue.plan()
    assert bench.names == ["running", "short", "long", "late"]


def test_short_prompts_share_an_engine() -> None:
    bench = Bench()
    for name in "abcdefghijk":
        bench.submit(name, 200)
    bench.queue.plan()
    assert bench.names == list("abcdefghij")  # 2,000 tokens; 200 more would be too many


def test_the_lowest_priority_of_clients_goes_first() -> None:
    bench = Bench()
    bench.submit("running", LONG)
    bench.queue.plan()
    bench.submit("usual", 3000)
    bench.submit("urgent", LONG, priority=-1)
    bench.end("running")
    bench.queue.plan()
    assert bench.names == ["running", "urgent"]


def test_a_tenant_with_many_prompts_does_not_keep_others_waiting() -> None:
    bench = Bench()
    for number in range(100):
        bench.submit(f"many {number}", 10_000, tenant="many")
    bench.submit("other", 12_000, tenant="other")
    while "other" not in bench.names:
        bench.queue.plan()
        bench.now_s += prefill_s(10_000, 0)
        bench.end(bench.names[-1])
    assert bench.names.index("other") < 15


def test_a_prompt_of_which_little_is_missing_is_computed_by_the_decode_engine() -> None:
    bench = Bench(threshold=2048)
    bench.submit("a", 2000)
    bench.queue.plan()
    assert bench.bound[0][1].why is Why.LITTLE_MISSING


def test_the_slower_an_engine_the_fewer_tokens_it_computes_beside_streams() -> None:
    bench = Bench(stall_weight=1.0)
    for name, tokens, why in (("a", 600, Why.SOONER), ("long", 2000, Why.PREFILL)):
        bench.submit(name, tokens)
        bench.queue.plan()
        assert bench.bound[-1][1].why is why
        bench.end(name)
    for _ in range(40):  # until the same prompt is known to take three times as long
        bench.queue.learn("m", LONG, 1.0, 3.0 / bench.queue.pace("m"))
    bench.submit("b", 600)
    bench.queue.plan()
    assert bench.bound[-1][1].why is Why.PREFILL


@pytest.mark.parametrize(("weight", "why"), [(0.01, Why.SOONER), (1.0, Why.PREFILL)])
def test_a_decode_engine_computes_a_prompt_where_that_is_worth_the_pause_of_its_streams(
    weight: float, why: Why
) -> None:
    bench = Bench(stall_weight=weight)
    bench.submit("running", LONG)
    bench.pool.engines(Role.DECODE, "m")
    bench.queue.plan()
    bench.submit("a", 5000)
    bench.queue.plan()
    bench.end("running")
    bench.queue.plan()
    assert dict(bench.bound)["a"].why is why


@pytest.mark.parametrize(("times", "why"), [(1.0, Why.SOONER), (3.0, Why.PREFILL)])
def test_long_pauses_of_streams_count_for_more_than_as_many_seconds_of_short_ones(
    times: float, why: Why
) -> None:
    bench = Bench(stall_weight=0.1)
    for _ in range(60):  # all takes so many times as long, the wait as well
        bench.queue.learn("m", LONG, 1.0, times / bench.queue.pace("m"))
    bench.submit("running", LONG)
    bench.queue.plan()
    bench.submit("a", 1500)
    bench.queue.plan()
    bench.end("running")
    bench.queue.plan()
    assert dict(bench.bound)["a"].why is why


def test_who_leaves_the_queue_is_not_bound() -> None:
    bench = Bench()
    bench.submit("running", LONG)
    bench.queue.plan()
    gone = bench.submit("gone", 3000)
    bench.submit("here", 5000)
    bench.queue.withdraw(gone)
    bench.queue.withdraw(gone)
    bench.end("running")
    bench.queue.plan()
    assert bench.names == ["running", "here"]


def test_a_prompt_waits_for_engines_that_are_there_now() -> None:
    bench = Bench(prefill=2)
    bench.submit("a", LONG)
    bench.submit("b", LONG)
    bench.queue.plan()
    bench.submit("c", LONG)
    bench.queue.plan()
    for engine in bench.engines[:2]:
        bench.pool.leave(engine)
    bench.queue.plan()
    assert dict(bench.bound)["c"].why is Why.NO_PREFILL_ENGINE


def test_the_pace_follows_what_long_legs_take() -> None:
    bench = Bench()
    for _ in range(200):
        bench.queue.learn("m", LONG, bench.queue.pace("m") * 1.0, 3.0)
        bench.queue.learn("m", 100, bench.queue.pace("m") * 1.0, 100.0)  # short: says nothing
    assert bench.queue.pace("m") == pytest.approx(3.0, rel=0.01)
    assert bench.queue.pace("other") == 1.0


def test_the_wait_is_the_work_before_each_engine() -> None:
    bench = Bench(prefill=2)
    for name in "abcd":
        bench.submit(name, LONG)
    bench.queue.plan()
    assert bench.queue.wait_s("m") == pytest.approx(prefill_s(LONG, 0))
    assert bench.queue.wait_s("other") == 0


def test_an_engine_that_is_the_home_of_another_router_is_taken_once_it_was_idle() -> None:
    bench = Bench()
    bench.queue.is_home = lambda _: False
    bench.submit("a", LONG)
    bench.queue.plan()
    bench.end("a")
    bench.submit("b", LONG)
    ring_s = bench.queue.plan()
    assert bench.names == ["a"]
    assert ring_s == pytest.approx(bench.now_s + IDLE_S)
    bench.now_s += IDLE_S + 1e-9
    bench.queue.plan()
    assert bench.names == ["a", "b"]


def test_a_router_without_a_home_waits_a_second_for_engines_that_are_never_idle() -> None:
    bench = Bench()
    bench.queue.is_home = lambda _: False
    others = bench.pool.reserve(bench.engines[0], LONG, prefill=True, work_s=0.1)
    bench.submit("a", LONG)
    while (ring_s := bench.queue.plan() or 0.0) < 101:
        bench.now_s = ring_s
    assert ring_s == 101
    bench.now_s = ring_s
    bench.queue.plan()
    others.release()
    bench.queue.plan()
    assert bench.names == ["a"]


@dataclass
class Overload:
    """Three times as many prompts as engines can compute, for a minute; then until all are bound.

    `came_s` and `bound_s`: when, by name; a name is a number and the prompt's tokens.
    """

    bench: Bench
    came_s: dict[str, float] = field(default_factory=dict)
    bound_s: dict[str, float] = field(default_factory=dict)

    def run(self, sizes: list[int], seed: int) -> None:
        random, at_s = Random(seed), self.bench.now_s
        works_s = sum(prefill_s(tokens, 0) for tokens in sizes)
        rate = 3 * self.bench.prefill * len(sizes) / works_s
        while at_s < 160:
            at_s += random.expovariate(rate)
            self.came_s[f"{len(self.came_s)} {random.choice(sizes)}"] = at_s
        events = [(at_s, name) for name, at_s in self.came_s.items()]
        ring_s: float | None = None
        while events or ring_s is not None:
            self.bench.now_s = min(events[0][0] if events else inf, ring_s or inf)
            while events and events[0][0] <= self.bench.now_s:
                name = heappop(events)[1]
                if name in self.bench.legs:
                    self.bench.end(name)
                else:
                    self.bench.submit(name, int(name.split()[1]))
            ring_s = self.bench.queue.plan()
            for name, plan in self.bench.bound[len(self.bound_s) :]:
                self.bound_s[name] = self.bench.now_s
                assert plan.prefill is not None
                heappush(events, (self.bench.now_s + plan.prefill.prefilling.work_s, name))

    def waits_s(self, tokens: int) -> list[float]:
        return [s - self.came_s[n] for n, s in self.bound_s.items() if n.endswith(f" {tokens}")]


@pytest.mark.parametrize(("engines", "short"), [(1, 100), (1, 500), (3, 5000)])
def test_a_prompt_is_overtaken_only_by_those_that_come_within_ten_times_its_work(
    engines: int, short: int
) -> None:
    overload = Overload(Bench(engines))
    shorts = round(prefill_s(30_000, 0) / prefill_s(short, 0))
    overload.run([30_000, *[short] * shorts], seed=1)
    came_s, bound_s = overload.came_s, overload.bound_s
    assert came_s.keys() == bound_s.keys()
    patience_s = (prefill_s(30_000, 0) - prefill_s(short, 0)) / AGING
    for long in (name for name in came_s if name.endswith(" 30000")):
        late = (s for name, s in bound_s.items() if came_s[name] > came_s[long] + patience_s)
        assert bound_s[long] <= min(late, default=inf) + HORIZON_S
    for tokens in (short, 30_000):
        longest_s = max(overload.waits_s(tokens))
        print(
            f"{engines} engines, 3 x load, {tokens} tokens: the longest wait is {longest_s:.1f} s"
        )


class Walk(RuleBasedStateMachine):
    """Prompts come and go, legs end, engines leave and join, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(prefill=3, decode=2, stall_weight=0.3)
        self.prompts: dict[str, QueuedPrompt] = {}
        self.number = 0
        self.ring_s: float | None = None

    def plan(self) -> None:
        self.ring_s = self.bench.queue.plan()

    @precondition(lambda self: self.bench.pool.engines(Role.DECODE, "m"))
    @rule(
        tokens=st.sampled_from([10, 1000, 5000, 100_000]),
        tenant=st.sampled_from("ab"),
        priority=st.integers(0, 1),
    )
    def submit(self, tokens: int, tenant: str, priority: int) -> None:
        self.number += 1
        name = str(self.number)
        self.prompts[name] = self.bench.submit(name, tokens, tenant, priority)
        self.plan()

    @precondition(lambda self: self.bench.legs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.bench.end(data.draw(st.sampled_from(sorted(self.bench.legs))))
        self.plan()

    @precondition(lambda self: self.bench.queue.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.bench.queue.withdraw(data.draw(st.sampled_from(self.bench.queue.waiting)))
        self.plan()

    @rule(index=st.integers(0, 4))
    def leave_or_join(self, index: int) -> None:
        engine = self.bench.engines[index]
        if engine.identity is None:
            self.bench.pool.join(engine, IDENTITY)
        else:
            self.bench.pool.leave(engine)
        self.plan()

    @rule(seconds=st.floats(0.001, 20))
    def wait(self, seconds: float) -> None:
        until_s = self.bench.now_s + seconds
        while self.ring_s is not None and self.ring_s <= until_s:
            assert self.ring_s > self.bench.now_s
            self.bench.now_s = self.ring_s
            self.plan()
        self.bench.now_s = until_s

    @invariant()
    def every_prompt_is_bound_once_or_waits(self) -> None:
        names = self.bench.names
        assert len(names) == len(set(names))
        waiting = self.bench.queue.waiting
        assert not any(self.prompts[name] in waiting for name in names)

    @invariant()
    def nobody_waits_while_an_engine_is_idle(self) -> None:
        idle = [e for e in self.bench.pool.engines(Role.PREFILL, "m") if not e.prefilling.legs]
        assert not (self.bench.queue.waiting and idle)

    def teardown(self) -> None:
        bench = self.bench
        while bench.legs or bench.queue.waiting:
            for engine in bench.engines:
                bench.pool.join(engine, IDENTITY)
            for name in list(bench.legs):
                bench.end(name)
            self.plan()
        for engine in bench.engines:
            load = engine.prefilling
            assert (load.legs, load.tokens, load.work_s) == (0, 0, 0)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
