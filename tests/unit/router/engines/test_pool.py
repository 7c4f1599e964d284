from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.router.conftest import Clock, joined

from kvrouter.engines.breaker import BreakerState
from kvrouter.engines.engine import Engine, HashDomain, Identity, Role
from kvrouter.engines.pool import EnginePool, Ticket
from kvrouter.http.failure import Failure
from kvrouter_store.identity.chain import root_hash


def diary_of(pool: EnginePool) -> list[tuple[str, str]]:
    """Grows with each engine that joins or leaves from now on."""
    entries: list[tuple[str, str]] = []
    pool.on_join(lambda engine: entries.append(("joined", engine.address)))
    pool.on_leave(lambda engine: entries.append(("left", engine.address)))
    return entries


def test_an_engine_is_asked_only_after_it_joined(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = pool.add("a:1", Role.DECODE)
    assert list(pool.engines(Role.DECODE)) == []
    pool.join(engine, Identity(("m",)))
    assert list(pool.engines(Role.DECODE)) == [engine]


def test_an_engine_is_asked_only_for_legs_of_its_role(clock: Clock) -> None:
    pool = EnginePool(clock)
    joined(pool, "a:1", Role.PREFILL)
    assert list(pool.engines(Role.DECODE)) == []


def test_an_address_named_under_both_roles_is_one_engine_for_both_legs(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "a:1", Role.PREFILL)
    assert pool.add("a:1", Role.DECODE) is engine
    assert list(pool.engines(Role.DECODE)) == list(pool.engines(Role.PREFILL)) == [engine]


def test_an_engine_is_asked_only_for_models_that_it_serves(clock: Clock) -> None:
    pool = EnginePool(clock)
    joined(pool, "a:1", Role.DECODE, models=("x", "x-lora"))
    second = joined(pool, "b:1", Role.DECODE, models=("y", "x"))
    assert list(pool.engines(Role.DECODE, "y")) == [second]
    assert pool.models() == ("x", "x-lora", "y")


def test_joins_and_leaves_are_reported_once_each(clock: Clock) -> None:
    pool = EnginePool(clock)
    diary = diary_of(pool)
    engine = joined(pool, "a:1", Role.DECODE)
    assert not pool.join(engine, Identity(("m",), None, 16))
    assert pool.leave(engine)
    assert not pool.leave(engine)
    assert diary == [("joined", "a:1"), ("left", "a:1")]


def test_an_engine_with_a_new_identity_was_restarted_and_held_nothing(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "a:1", Role.DECODE, manifest="one")
    diary = diary_of(pool)
    pool.join(engine, Identity(("m",), None, 16, "two"))
    assert diary == [("left", "a:1"), ("joined", "a:1")]


def test_a_refused_connection_takes_the_engine_out_at_once(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "a:1", Role.DECODE)
    assert pool.failed(engine, Failure.REFUSED)
    assert list(pool.engines(Role.DECODE)) == []
    assert pool.state(engine) is None


def test_an_engine_whose_breaker_is_open_is_not_asked_until_its_trial(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "a:1", Role.DECODE)
    for _ in range(3):
        pool.failed(engine, Failure.STATUS)
    assert list(pool.engines(Role.DECODE)) == []
    assert pool.state(engine) is BreakerState.OPEN
    clock.pass_s(1.0)
    assert list(pool.engines(Role.DECODE)) == [engine]
    trial = pool.reserve(engine, 1)
    assert list(pool.engines(Role.DECODE)) == []
    pool.succeeded(engine)
    trial.release()
    assert pool.state(engine) is BreakerState.CLOSED


def test_a_leg_that_fails_after_its_engine_left_changes_nothing(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "a:1", Role.DECODE)
    pool.leave(engine)
    assert not pool.failed(engine, Failure.BROKEN)
    pool.join(engine, Identity(("m",)))
    assert list(pool.engines(Role.DECODE)) == [engine]


def test_a_ticket_counts_until_its_first_release(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "a:1", Role.DECODE)
    ticket = pool.reserve(engine, 100)
    assert (engine.requests, engine.tokens) == (1, 100)
    ticket.release()
    ticket.release()
    assert (engine.requests, engine.tokens) == (0, 0)


def test_a_planned_leg_is_load_at_once_and_in_flight_only_when_it_begins(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "a:1", Role.DECODE)
    ticket = pool.reserve(engine, 100, begun=False)
    assert (engine.requests, engine.tokens) == (0, 100)
    ticket.begin()
    ticket.begin()
    assert (engine.requests, engine.tokens) == (1, 100)
    ticket.release()
    assert (engine.requests, engine.tokens) == (0, 0)


def test_a_prompt_that_is_computed_while_decoding_holds_others_up_only_until_it_is(
    clock: Clock,
) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "a:1", Role.DECODE)
    ticket = pool.reserve(engine, 100, computing_tokens=60)
    assert (engine.tokens, engine.computing_tokens) == (100, 60)
    ticket.computed()
    ticket.computed()
    assert (engine.tokens, engine.computing_tokens) == (100, 0)
    ticket.release()
    pool.reserve(engine, 100, computing_tokens=60).release()
    assert (engine.tokens, engine.computing_tokens) == (0, 0)


def test_an_engine_with_planned_legs_alone_drains_at_once(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "a:1", Role.DECODE)
    ticket = pool.reserve(engine, 100, begun=False)
    assert pool.drain(engine)
    ticket.release()
    assert (engine.requests, engine.tokens) == (0, 0)


def test_a_planned_leg_is_no_trial_of_an_engine_that_failed_until_it_begins(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "a:1", Role.DECODE)
    for _ in range(3):
        pool.failed(engine, Failure.STATUS)
    clock.pass_s(1)
    ticket = pool.reserve(engine, 1, begun=False)
    assert list(pool.engines(Role.DECODE)) == [engine]
    ticket.begin()
    assert list(pool.engines(Role.DECODE)) == []
    ticket.release()
    assert list(pool.engines(Role.DECODE)) == [engine]


def test_the_hash_domain_is_that_of_most_engines_decode_engines_first(clock: Clock) -> None:
    pool = EnginePool(clock)
    assert pool.domain("m") is None
    joined(pool, "a:1", Role.PREFILL, block_tokens=None)
    assert pool.domain("m") is None
    joined(pool, "b:1", Role.PREFILL, block_tokens=64)
    assert pool.domain("m") == HashDomain(64, root_hash(None))
    joined(pool, "c:1", Role.PREFILL)
    joined(pool, "d:1", Role.PREFILL)
    assert pool.domain("m") == HashDomain(16, root_hash(None))
    decode = joined(pool, "e:1", Role.DECODE, block_tokens=32)
    assert pool.domain("m") == HashDomain(32, root_hash(None))
    pool.leave(decode)
    assert pool.domain("m") == HashDomain(16, root_hash(None))


def test_each_model_has_a_hash_domain_of_its_own(clock: Clock) -> None:
    pool = EnginePool(clock)
    small = joined(pool, "a:1", Role.DECODE, models=("s",), block_tokens=16)
    for port in (2, 3):
        joined(pool, f"b:{port}", Role.DECODE, models=("l",), block_tokens=64)
    both = pool.domain("s"), pool.domain("l")
    assert both == (HashDomain(16, root_hash(None)), HashDomain(64, root_hash(None)))
    assert pool.domain("other") is None
    pool.update_models(small, replace(identity_of(small), models=("s", "lora")))
    assert pool.domain("lora") == pool.domain("s")


def test_an_engine_is_heard_in_the_domain_of_a_model_with_blocks_of_its_size(clock: Clock) -> None:
    pool = EnginePool(clock)
    odd = joined(pool, "a:1", Role.DECODE, models=("m", "own"), block_tokens=64)
    seeded = joined(pool, "b:1", Role.DECODE, root=root_hash("0"))
    silent = joined(pool, "c:1", Role.DECODE, block_tokens=None)
    for port in (1, 2):
        joined(pool, f"d:{port}", Role.DECODE)
    usual = HashDomain(16, root_hash(None))
    assert (pool.domain("m"), pool.domain("own")) == (usual, HashDomain(64, root_hash(None)))
    assert pool.domain_of(odd) == pool.domain("own")
    assert pool.domain_of(seeded) == pool.domain_of(silent) == usual
    pool.leave(odd)
    assert pool.domain_of(odd) is None


def test_a_leg_may_have_engines_while_one_of_them_may_serve_the_model(clock: Clock) -> None:
    pool = EnginePool(clock)
    joined(pool, "a:1", Role.PREFILL, models=("m",))
    assert pool.has_role(Role.PREFILL, "m")
    assert not pool.has_role(Role.PREFILL, "other")
    away = joined(pool, "b:1", Role.PREFILL, models=("third",))
    pool.leave(away)
    assert [pool.has_role(Role.PREFILL, each) for each in ("third", "other")] == [True, False]
    pool.add("c:1", Role.PREFILL)
    assert pool.has_role(Role.PREFILL, "other")


def identity_of(engine: Engine) -> Identity:
    assert engine.identity is not None
    return engine.identity


class PoolMachine(RuleBasedStateMachine):
    """Whatever joins, leaves, fails and is reserved: counts are exact, absent engines unused."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pool = EnginePool(self.clock)
        roles = (Role.PREFILL, Role.DECODE, Role.BOTH)
        self.all = [self.pool.add(f"e:{port}", role) for port, role in enumerate(roles, 1)]
        self.tickets: list[Ticket] = []
        self.busy_s = [0.0] * len(self.all)

    @rule(which=st.integers(0, 2), manifest=st.sampled_from(["x", "y"]))
    def join(self, which: int, manifest: str) -> None:
        self.pool.join(self.all[which], Identity(("m",), manifest=manifest))

    @rule(which=st.integers(0, 2))
    def leave(self, which: int) -> None:
        self.pool.leave(self.all[which])

    @rule(
        which=st.integers(0, 2),
        tokens=st.integers(0, 1000),
        begun=st.booleans(),
        computing_tokens=st.integers(0, 100),
    )
    def reserve(self, which: int, tokens: int, begun: bool, computing_tokens: int) -> None:
        engine = self.all[which]
        ticket = self.pool.reserve(engine, tokens, begun=begun, computing_tokens=computing_tokens)
        self.tickets.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.tickets)).computed()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.tickets)).begin()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        ticket.release()
        if again:
            ticket.release()
            ticket.begin()

    @rule(which=st.integers(0, 2), reason=st.sampled_from(list(Failure)))
    def fail(self, which: int, reason: Failure) -> None:
        self.pool.failed(self.all[which], reason)

    @rule(which=st.integers(0, 2))
    def succeed(self, which: int) -> None:
        self.pool.succeeded(self.all[which])

    @rule(seconds=st.floats(0.0, 40.0))
    def wait(self, seconds: float) -> None:
        for which, engine in enumerate(self.all):
            self.busy_s[which] += seconds if engine.requests else 0.0
        self.clock.pass_s(seconds)

    @invariant()
    def an_engine_is_busy_while_it_has_legs(self) -> None:
        assert [self.pool.busy_s(engine) for engine in self.all] == pytest.approx(self.busy_s)

    @invariant()
    def counts_are_those_of_open_tickets(self) -> None:
        for engine in self.all:
            mine = [ticket for ticket in self.tickets if ticket.engine is engine]
            assert engine.tokens == sum(ticket.tokens for ticket in mine)
            assert engine.legs == len(mine)
            assert engine.requests == sum(ticket.begun for ticket in mine)
            assert engine.computing_tokens == sum(ticket.computing_tokens for ticket in mine)

    @invariant()
    def only_joined_engines_that_may_be_asked_are_candidates(self) -> None:
        for role in (Role.PREFILL, Role.DECODE):
            expected = [
                e
                for e in self.all
                if e.identity and e.role.serves(role) and e.breaker and e.breaker.allows()
            ]
            assert list(self.pool.engines(role, "m")) == expected
            assert list(self.pool.engines(role, "other")) == []


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


RANKED = Identity(("m",), ranks=(4, 5, 6))


def test_each_rank_of_an_engine_is_a_target_of_its_own(clock: Clock) -> None:
    pool = EnginePool(clock)
    diary = diary_of(pool)
    engine = pool.add("[::1]:80", Role.DECODE)
    pool.join(engine, RANKED)
    targets = list(pool.engines(Role.DECODE, "m"))
    assert [t.address for t in targets] == ["[::1]:80@0", "[::1]:80@1", "[::1]:80@2"]
    assert {(t.host, t.port, t.url) for t in targets} == {("::1", 80, "http://[::1]:80")}
    assert [(t.rank, t.event_rank, t.joins) for t in targets] == [(0, 4, 1), (1, 5, 1), (2, 6, 1)]
    assert [engine.rank_of_events(number) for number in (3, 4, 6)] == [None, targets[0], targets[2]]
    assert diary == [("joined", t.address) for t in targets]
    assert pool.all() == (engine,)


def test_a_rank_that_refuses_takes_the_whole_engine_along_and_back(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = pool.add("a:1", Role.DECODE)
    pool.join(engine, RANKED)
    before = list(pool.engines(Role.DECODE))
    assert pool.failed(before[1], Failure.REFUSED)
    assert list(pool.engines(Role.DECODE)) == []
    assert not pool.failed(before[2], Failure.REFUSED)
    pool.join(engine, RANKED)
    assert list(pool.engines(Role.DECODE)) == before  # the same objects: legs in flight count


def test_one_ranks_breaker_leaves_the_others_alone(clock: Clock) -> None:
    pool = EnginePool(clock)
    pool.join(pool.add("a:1", Role.DECODE), RANKED)
    first, *others = pool.engines(Role.DECODE)
    for _ in range(3):
        pool.failed(first, Failure.TIMEOUT)
    assert pool.state(first) is BreakerState.OPEN
    assert list(pool.engines(Role.DECODE)) == others


def test_an_engine_with_ranks_drains_when_all_of_them_are_idle(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = pool.add("a:1", Role.DECODE)
    pool.join(engine, RANKED)
    tickets = [pool.reserve(target, 10) for target in pool.engines(Role.DECODE)]
    assert (engine.requests, engine.tokens) == (3, 30)
    assert not pool.drain(engine)
    assert list(pool.engines(Role.DECODE)) == []
    for ticket in tickets[:2]:
        ticket.release()
    assert pool.find("a:1") is engine
    tickets[2].release()
    assert pool.find("a:1") is None


def test_an_engine_that_comes_back_with_fewer_ranks_counts_what_is_in_flight_on_the_others(
    clock: Clock,
) -> None:
    pool = EnginePool(clock)
    engine = pool.add("a:1", Role.DECODE)
    pool.join(engine, RANKED)
    last = list(pool.engines(Role.DECODE))[-1]
    ticket = pool.reserve(last, 10)
    pool.join(engine, Identity(("m",)))
    assert list(pool.engines(Role.DECODE)) == [engine]
    assert engine.requests == 1
    ticket.release()
    assert (engine.requests, last.requests) == (0, 0)
    pool.join(engine, RANKED)
    assert list(pool.engines(Role.DECODE))[-1] is last


def test_a_role_that_is_changed_is_changed_of_every_rank(clock: Clock) -> None:
    pool = EnginePool(clock)
    pool.join(pool.add("a:1", Role.DECODE), RANKED)
    pool.assign("a:1", Role.PREFILL)
    assert [t.role for t in pool.targets()] == [Role.PREFILL] * 3
    assert list(pool.engines(Role.DECODE)) == []


def test_a_server_is_busy_while_any_of_its_ranks_is(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = pool.add("a:1", Role.DECODE)
    pool.join(engine, Identity(("m",), ranks=(0, 1)))
    one = pool.reserve(engine.ranks[0], 1)
    clock.pass_s(2)
    other = pool.reserve(engine.ranks[1], 1)
    one.release()
    clock.pass_s(3)
    other.release()
    clock.pass_s(4)
    assert pool.busy_s(engine) == 5


def test_an_engine_is_down_while_it_is_away_or_all_its_breakers_are_open(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = pool.add("a:1", Role.DECODE)
    assert pool.down(engine)
    pool.join(engine, Identity(("m",), ranks=(0, 1)))
    assert not pool.down(engine)
    for rank in engine.ranks:
        assert not pool.down(engine)
        for _ in range(3):
            pool.failed(rank, Failure.TIMEOUT)
    assert pool.down(engine)
    clock.pass_s(1)
    assert not pool.down(engine)
    pool.leave(engine)
    assert pool.down(engine)


def test_people_are_told_what_happens_to_engines(clock: Clock) -> None:
    pool = EnginePool(clock)
    told: list[str] = []
    pool.on_change(lambda change, engine: told.append(f"{engine.address} {change}"))
    engine = joined(pool, "a:1", Role.DECODE)
    for _ in range(4):
        pool.failed(engine, Failure.TIMEOUT)
    pool.succeeded(engine)
    pool.failed(engine, Failure.TIMEOUT)
    pool.succeeded(engine)
    pool.leave(engine)
    pool.join(engine, Identity(("m",)))
    ticket = pool.reserve(engine, 1)
    pool.drain(engine)
    ticket.release()
    changes = ("joined", "breaker open", "breaker closed", "left", "joined", "draining", "removed")
    assert told == [f"a:1 {change}" for change in changes]


def test_an_engine_that_names_no_store_node_has_that_of_its_host(clock: Clock) -> None:
    pool = EnginePool(clock)
    engine = joined(pool, "e:1", Role.BOTH)
    assert engine.node is None
    pool.nodes.maps.append({"e:1": "kv://here:1"})
    assert engine.node == "kv://here:1"
    engine.set_ranks((0, 1))
    assert [rank.node for rank in engine.ranks] == ["kv://here:1"] * 2
    engine.identity = Identity(("m",), node="kv://named:1")
    assert engine.node == "kv://named:1"
