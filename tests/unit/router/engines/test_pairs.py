"""Breakers of pairs: what one prefill engine hands over to one decode engine."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.router.conftest import Clock, joined

from kvrouter.engines.breaker import BreakerState
from kvrouter.engines.compatibility import partners
from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.http.failure import Failure

THRESHOLD = 3


@pytest.fixture
def pool(clock: Clock) -> EnginePool:
    return EnginePool(clock)


def pair_of(pool: EnginePool) -> tuple[Engine, Engine]:
    return joined(pool, "p:1", Role.PREFILL), joined(pool, "d:1", Role.DECODE)


def fail(pool: EnginePool, prefill: Engine, decode: Engine, times: int = THRESHOLD) -> None:
    for _ in range(times):
        pool.proven(decode, Failure.ERROR, prefill)


def test_a_pair_that_fails_is_avoided_and_its_engines_are_not(pool: EnginePool) -> None:
    prefill, decode = pair_of(pool)
    other, elsewhere = joined(pool, "p:2", Role.PREFILL), joined(pool, "d:2", Role.DECODE)
    fail(pool, prefill, decode, THRESHOLD - 1)
    assert list(partners([prefill, other], decode)) == [prefill, other]
    fail(pool, prefill, decode, 1)
    assert list(partners([prefill, other], decode)) == [other]
    assert list(partners([prefill, other], elsewhere)) == [prefill, other]
    assert pool.state(prefill) is pool.state(decode) is BreakerState.CLOSED
    assert list(pool.engines(Role.DECODE, "m")) == [decode, elsewhere]


def test_a_decode_engine_without_a_partner_waits_behind_those_that_have_one(
    pool: EnginePool,
) -> None:
    prefill, decode = pair_of(pool)
    fail(pool, prefill, decode)
    assert list(pool.engines(Role.DECODE, "m")) == [decode]
    elsewhere = joined(pool, "d:2", Role.DECODE)
    assert list(pool.engines(Role.DECODE, "m")) == [elsewhere]
    fail(pool, prefill, elsewhere)
    assert list(pool.engines(Role.DECODE, "m")) == [decode, elsewhere]


def test_one_trial_goes_to_a_pair_in_each_pause_and_closes_it_or_doubles_the_pause(
    pool: EnginePool, clock: Clock
) -> None:
    prefill, decode = pair_of(pool)
    fail(pool, prefill, decode)
    clock.pass_s(1.0)
    assert list(partners([prefill], decode)) == [prefill]
    decode.pairs[prefill].began()
    assert not partners([prefill], decode)
    fail(pool, prefill, decode, 1)
    clock.pass_s(1.9)
    assert not partners([prefill], decode)
    clock.pass_s(0.1)
    decode.pairs[prefill].began()
    pool.pairs.worked(prefill, decode)
    assert list(partners([prefill], decode)) == [prefill]
    assert not pool.pairs


def test_a_trial_without_a_verdict_is_followed_by_another(pool: EnginePool, clock: Clock) -> None:
    prefill, decode = pair_of(pool)
    fail(pool, prefill, decode)
    clock.pass_s(1.0)
    decode.pairs[prefill].began()
    clock.pass_s(2.0)
    assert list(partners([prefill], decode)) == [prefill]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_restart_of_either_engine_forgets_the_pair(pool: EnginePool, role: Role) -> None:
    prefill, decode = pair_of(pool)
    fail(pool, prefill, decode)
    engine = prefill if role is Role.PREFILL else decode
    identity = engine.identity
    assert identity is not None
    pool.leave(engine)
    assert not pool.pairs
    fail(pool, prefill, decode)  # of legs that end late
    assert not pool.pairs
    pool.join(engine, identity)
    assert list(partners([prefill], decode)) == [prefill]


class PairMachine(RuleBasedStateMachine):
    """Two prefill and two decode engines, and what is known of each pair by a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pool = EnginePool(self.clock)
        self.prefill = [self.pool.add(f"p:{port}", Role.PREFILL) for port in (1, 2)]
        self.decode = [self.pool.add(f"d:{port}", Role.DECODE) for port in (1, 2)]
        self.failures: dict[tuple[Engine, Engine], int] = {}

    @rule(which=st.integers(0, 3))
    def join(self, which: int) -> None:
        self.pool.join([*self.prefill, *self.decode][which], Identity(("m",)))

    @rule(which=st.integers(0, 3))
    def leave(self, which: int) -> None:
        engine = [*self.prefill, *self.decode][which]
        self.pool.leave(engine)
        self.failures = {pair: n for pair, n in self.failures.items() if engine not in pair}

    @rule(prefill=st.integers(0, 1), decode=st.integers(0, 1))
    def fail(self, prefill: int, decode: int) -> None:
        pair = self.prefill[prefill], self.decode[decode]
        self.pool.proven(pair[1], Failure.ABORTED, pair[0])
        if all(engine.identity for engine in pair):
            self.failures[pair] = self.failures.get(pair, 0) + 1

    @rule(prefill=st.integers(0, 1), decode=st.integers(0, 1))
    def work(self, prefill: int, decode: int) -> None:
        pair = self.prefill[prefill], self.decode[decode]
        self.pool.pairs.worked(*pair)
        self.failures.pop(pair, None)

    @rule(seconds=st.floats(0.0, 40.0))
    def wait(self, seconds: float) -> None:
        self.clock.pass_s(seconds)

    @invariant()
    def only_pairs_that_failed_since_they_worked_are_remembered(self) -> None:
        assert {(p, d) for p, d, _ in self.pool.pairs} == self.failures.keys()
        assert bool(self.pool.pairs) is bool(self.failures)

    @invariant()
    def a_pair_is_open_only_after_as_many_failures_in_a_row(self) -> None:
        for prefill, decode, breaker in self.pool.pairs:
            opened = breaker.state is not BreakerState.CLOSED
            assert opened is (self.failures[prefill, decode] >= THRESHOLD)

    @invariant()
    def some_decode_engine_is_asked_while_there_is_one(self) -> None:
        here = [engine for engine in self.decode if engine.identity]
        assert bool(self.pool.engines(Role.DECODE, "m")) is bool(here)


TestPairMachine = PairMachine.TestCase
TestPairMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
