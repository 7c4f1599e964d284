"""Sessions keep their engines when others join or leave, and leave those that have too much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.engine import Engine, Role
from kvrouter.routing.plan import RouteInputs
from kvrouter.routing.policies import make_policy
from kvrouter.routing.rendezvous import BOUND, LEAST_TOKENS, in_order, with_room

SESSIONS = [f"session {number}".encode() for number in range(2000)]


def fleet(count: int) -> list[Engine]:
    return [Engine(f"10.0.0.{number}:8000", Role.DECODE) for number in range(count)]


def places(engines: list[Engine]) -> list[str]:
    return [in_order(session, engines)[0].address for session in SESSIONS]


@pytest.mark.parametrize("count", [3, 4, 8])
def test_an_engine_that_joins_takes_its_share_and_moves_no_other_session(count: int) -> None:
    engines = fleet(count + 1)
    before, after = places(engines[:-1]), places(engines)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {engines[-1].address}
    assert len(moved) <= 1.25 * len(SESSIONS) / (count + 1)


@pytest.mark.parametrize("count", [3, 4, 8])
def test_the_sessions_of_an_engine_that_leaves_are_all_that_move(count: int) -> None:
    engines = fleet(count)
    for gone in engines:
        before, after = places(engines), places([each for each in engines if each is not gone])
        moved = [old for old, new in zip(before, after, strict=True) if old != new]
        assert set(moved) == {gone.address}
        assert len(moved) <= 1.25 * len(SESSIONS) / count


def test_sessions_are_spread_evenly() -> None:
    engines = fleet(4)
    found = places(engines)
    assert all(found.count(each.address) <= 1.15 * len(SESSIONS) / 4 for each in engines)


def test_the_order_of_engines_makes_no_difference() -> None:
    engines = fleet(5)
    assert places(engines) == places(engines[::-1])


@given(
    loads=st.lists(st.integers(0, 100_000), min_size=1, max_size=8),
    session=st.binary(min_size=1, max_size=20),
)
def test_no_engine_with_too_much_takes_a_session(loads: list[int], session: bytes) -> None:
    engines = fleet(len(loads))
    for engine, load in zip(engines, loads, strict=True):
        engine.tokens = load
    limit = max(BOUND * sum(loads) / len(loads), LEAST_TOKENS)
    assert with_room(in_order(session, engines), BOUND)[0].tokens <= limit


def test_prefix_asks_for_the_session_only_where_no_engine_has_the_beginning() -> None:
    engines, policy = fleet(4), make_policy("prefix")
    own = in_order(b"s", engines)[0]
    other = next(each for each in engines if each is not own)
    inputs = RouteInputs(1000, engines, learnt=True, session=b"s", block_tokens=128)
    assert {policy.plan(inputs).decode for _ in range(5)} == {own}
    inputs.guesses = {other: 5}
    assert {policy.plan(inputs).decode for _ in range(5)} == {other}


def test_an_engine_with_much_of_the_prompt_keeps_it_until_it_computes_more_than_that() -> None:
    busy, idle = fleet(2)
    policy = make_policy("prefix")
    inputs = RouteInputs(2000, [busy, idle], learnt=True, block_tokens=128, guesses={busy: 14})
    busy.tokens, busy.computing_tokens = 6000, 600
    assert policy.plan(inputs).decode is busy
    busy.computing_tokens = 1600
    assert policy.plan(inputs).decode is idle


def test_an_engine_with_far_more_than_the_mean_loses_what_only_it_has() -> None:
    busy, *idle = fleet(4)
    policy = make_policy("prefix")
    inputs = RouteInputs(9000, [busy, *idle], learnt=True, block_tokens=128, guesses={busy: 70})
    busy.tokens = 4 * 9000
    assert policy.plan(inputs).decode is busy
    busy.tokens = 5 * 9000
    assert policy.plan(inputs).decode in idle


def test_of_engines_that_hold_the_same_the_sessions_is_chosen_each_time() -> None:
    engines, policy = fleet(4), make_policy("prefix")
    inputs = RouteInputs(1000, engines, learnt=True, session=b"s", block_tokens=128)
    inputs.guesses = dict.fromkeys(engines, 5)
    assert {policy.plan(inputs).decode for _ in range(5)} == {in_order(b"s", engines)[0]}


def test_engines_that_compute_prompts_themselves_are_priced_by_what_they_compute() -> None:
    """An exact match counts more than answers in flight, which cost the prompt little."""
    busy, idle = fleet(2)
    policy = make_policy("prefix")
    inputs = RouteInputs(2000, [busy, idle], exact=True, block_tokens=16, matches={busy: 120})
    busy.tokens = 6000
    assert policy.plan(inputs).decode is busy
    busy.computing_tokens = 2000
    assert policy.plan(inputs).decode is idle
