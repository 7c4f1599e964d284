"""Whether tenants that always have requests waiting get equally many tokens."""

from collections import Counter
from functools import partial
from heapq import heappop, heappush
from itertools import combinations, count
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.unit.router.conftest import Clock

from kvrouter.admission.queue import Admission, Turn, Waiting, Work

PROMPTS = {"long": 32_000, "short": 200}


class Service(NamedTuple):
    """How long an engine takes for a request, however many run beside it."""

    base_s: float = 0.0
    per_token_s: float = 0.0


class Site:
    """A queue before engines, and tenants whose clients ask again as soon as they are answered.

    Each tenant has more clients than requests can run. `served` counts tokens at a request's end.
    """

    def __init__(self, limit: int, service: Service, clock: Clock) -> None:
        self.door = Admission(limit, 10**6, clock)
        self.served: Counter[str] = Counter()
        self._limit = limit
        self._service = service
        self._clock = clock
        self._order = count()
        self._running: list[tuple[float, int, Waiting | None, int]] = []
        for _ in range(limit):
            assert self.door.enter()
            self._run(None, 1, 0)

    def add(self, tenant: str, work: Work, generated: int) -> None:
        for _ in range(2 * self._limit):
            self._ask(tenant, work, generated)

    def serve(self, tokens: int) -> None:
        """Until so many tokens are served."""
        while self.served.total() < tokens:
            end_s, _, place, generated = heappop(self._running)
            self._clock.pass_s(end_s - self._clock())
            if place is not None:
                self.door.correct(place, generated)
            self.door.leave()
            if place is not None:
                self.served[place.tenant] += place.work.prompt_tokens + generated
                self._ask(place.tenant, place.work, generated)

    def _ask(self, tenant: str, work: Work, generated: int) -> None:
        def begin() -> None:
            self._run(place, work.prompt_tokens + generated, generated)

        place = self.door.join(tenant, 0, work, begin)
        assert place is not None

    def _run(self, place: Waiting | None, tokens: int, generated: int) -> None:
        end_s = self._clock() + self._service.base_s + self._service.per_token_s * tokens
        heappush(self._running, (end_s, next(self._order), place, generated))


@pytest.mark.parametrize("limit", [1, 2, 7, 64])
@pytest.mark.parametrize(
    "service", [Service(base_s=0.1), Service(per_token_s=1e-4), Service(0.02, 1e-5)], ids=str
)
def test_tenants_with_long_and_with_short_prompts_get_equally_many_tokens(
    clock: Clock, limit: int, service: Service
) -> None:
    site = Site(limit, service, clock)
    for tenant, prompt in PROMPTS.items():
        site.add(tenant, Work(prompt, 0), 0)
    site.serve(30 * (limit + 1) * PROMPTS["long"])
    equal(site.served)


@pytest.mark.parametrize("limit", [1, 16])
def test_it_makes_no_difference_whether_tokens_are_read_or_written(
    clock: Clock, limit: int
) -> None:
    site = Site(limit, Service(0.02, 1e-4), clock)
    site.add("reads", Work(8_000, 256), 10)
    site.add("chats", Work(500, 256), 300)
    site.add("writes", Work(20, 256), 4_000)
    site.serve(60 * (limit + 1) * 8_000)
    equal(site.served)


def test_a_tenant_that_comes_late_gets_an_equal_share_from_then_on(clock: Clock) -> None:
    site = Site(4, Service(0.02, 1e-5), clock)
    site.add("long", Work(32_000, 0), 0)
    site.serve(50 * 32_000)
    site.served.clear()
    site.add("short", Work(200, 0), 0)
    site.serve(100 * 32_000)
    equal(site.served)


def equal(served: Counter[str]) -> None:
    """Each has its share, within 10 %."""
    share = served.total() / len(served)
    assert all(tokens == pytest.approx(share, rel=0.1) for tokens in served.values()), served


def test_new_tenants_that_never_stop_coming_do_not_starve_one_that_owes(clock: Clock) -> None:
    door = Admission(1, 10, clock)
    assert door.enter()
    waiting(door, "heavy", 32_000)
    for number in range(5):
        waiting(door, f"early {number}", 1_000)
    door.leave()
    again = waiting(door, "heavy", 32_000)
    for number in range(2_000):
        waiting(door, f"new {number}", 1_000)
        door.leave()
        if again.turn is Turn.ADMITTED:
            break
    # It owes 32 turns of theirs. Six tenants wait, and each turn lifts the level by an eighth.
    assert 5 < number < 32 * 8 * 6


def waiting(door: Admission, tenant: str, tokens: int) -> Waiting:
    joined = door.join(tenant, 0, Work(tokens, 0), lambda: None)
    assert joined is not None
    return joined


def test_what_was_had_while_nobody_waited_is_not_held_against_a_tenant(clock: Clock) -> None:
    door = Admission(1, 10, clock)
    assert door.enter()
    waiting(door, "a", 32_000)
    door.leave()
    door.leave()
    assert door.enter()  # a free place
    first, second = waiting(door, "a", 200), waiting(door, "b", 200)
    door.leave()
    assert (first.turn, second.turn) == (Turn.ADMITTED, Turn.WAITING)


TENANTS = ("a", "b", "c")
LARGEST = 1000
ANSWER = 50
LIMITS = st.integers(1, 5)
TOKENS = st.one_of(st.integers(1, LARGEST - ANSWER), st.sampled_from([1, LARGEST - ANSWER]))
GENERATED = st.integers(0, 2 * ANSWER)


class Backlog(RuleBasedStateMachine):
    """Tenants that always have requests waiting, unless they pause; in any order and of any size.

    `had` is what a tenant was charged for, put right at the end of each request. The differences of
    two tenants are compared with those of the moment when both began to wait.
    """

    @initialize(limit=LIMITS, usual=st.tuples(TOKENS, TOKENS, TOKENS))
    def start(self, limit: int, usual: tuple[int, int, int]) -> None:
        self.limit = limit
        self.usual = dict(zip(TENANTS, usual, strict=True))
        self.door = Admission(limit, 10**6, Clock())
        self.had = dict.fromkeys(TENANTS, 0)
        self.running: list[Waiting | None] = []
        self.waits: dict[str, list[Waiting]] = {}
        self.since: dict[tuple[str, str], int] = {}

    @precondition(lambda self: len(self.waits) < len(TENANTS))
    @rule(data=st.data())
    def come(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from([each for each in TENANTS if each not in self.waits]))
        while self.door.enter():
            self.running.append(None)
        self.waits[tenant] = []
        self.ask(tenant)
        for pair in combinations(TENANTS, 2):
            if tenant in pair:
                self.since[pair] = self.difference(pair)

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(sorted(self.waits)))
        for each in self.waits.pop(tenant):
            self.door.withdraw(each)

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 4), generated=GENERATED, unusual=st.none() | TOKENS)
    def end(self, place: int, generated: int, unusual: int | None) -> None:
        turn = self.running.pop(place % len(self.running))
        if turn is not None:
            self.had[turn.tenant] += generated - turn.work.answer_tokens
            self.door.correct(turn, generated)
        self.door.leave()
        for each in self.waits:
            self.ask(each, unusual)

    def ask(self, tenant: str, unusual: int | None = None) -> None:
        """Let `tenant` have two requests waiting, so that it has one after the next turn too."""
        waits = self.waits[tenant]
        waits[:] = [each for each in waits if each.turn is Turn.WAITING]
        while len(waits) < 2:
            work = Work(unusual or self.usual[tenant], ANSWER)
            joined: list[Waiting] = []
            place = self.door.join(tenant, 0, work, partial(self.begin, joined))
            assert place is not None
            joined.append(place)
            waits.append(place)

    def begin(self, joined: list[Waiting]) -> None:
        (turn,) = joined
        self.had[turn.tenant] += sum(turn.work)
        self.running.append(turn)

    def difference(self, pair: tuple[str, str]) -> int:
        return self.had[pair[0]] - self.had[pair[1]]

    @invariant()
    def those_who_wait_get_equally_many_tokens(self) -> None:
        for pair in combinations(sorted(self.waits), 2):
            unknown = self.limit * ANSWER  # of answers whose length is not known yet
            apart = abs(self.difference(pair) - self.since[pair])
            assert apart <= 2 * (LARGEST + unknown)


TestBacklog = Backlog.TestCase
TestBacklog.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
