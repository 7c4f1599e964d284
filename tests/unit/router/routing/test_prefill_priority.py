"""Which `priority` prefill legs are sent with."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.errors import ApiError
from kvrouter.openai.request import Request, parse
from kvrouter.routing.plan import AGING, MAX_GIVEN, Mode, PrefillPriorities, work_ms

GIVEN = st.integers(-MAX_GIVEN, MAX_GIVEN)
TOKENS = st.integers(0, 2_000_000)
TIMES = st.floats(1.7e9, 4e9)


def engine(*, takes: bool = True) -> Engine:
    made = Engine("e:1", Role.PREFILL)
    made.identity = Identity(("m",), takes_priority=takes)
    return made


def asked(tokens: int = 100, **members: object) -> Request:
    body = {"model": "m", "prompt": [1] * max(1, min(tokens, 100)), **members}
    request = parse(json.dumps(body).encode(), "completion", 1)
    request.prompt_tokens = tokens
    return request


def told(request: Request, computed: int, now_s: float = 1.8e9, mode: Mode = "auto") -> int | None:
    return PrefillPriorities(mode, lambda: now_s).of(request, engine(), computed)


@pytest.mark.parametrize(
    ("mode", "takes", "ranked"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_only_the_engines_of_the_mode_get_a_priority(mode: Mode, takes: bool, ranked: bool) -> None:
    value = PrefillPriorities(mode).of(asked(), engine(takes=takes), 100)
    assert (value is not None) == ranked


def test_an_engine_that_left_gets_no_priority() -> None:
    gone = Engine("e:1", Role.PREFILL)
    assert PrefillPriorities("on").of(asked(), gone, 100) is None


@given(fewer=TOKENS, more=TOKENS, held=st.integers(0, 100_000))
def test_of_legs_that_come_together_the_shorter_goes_first(
    fewer: int, more: int, held: int
) -> None:
    fewer, more = sorted((fewer, more))
    short, long = (told(asked(held + tokens), tokens) for tokens in (fewer, more))
    assert short is not None
    assert long is not None
    assert short <= long
    if work_ms(more, held) - work_ms(fewer, held) > 1:
        assert short < long


def test_a_millisecond_is_ten_tokens_and_long_contexts_cost_more() -> None:
    assert work_ms(1000, 0) == pytest.approx(100, rel=0.02)
    assert work_ms(1000, 100_000) > 4 * work_ms(1000, 0)


@given(first=GIVEN, second=GIVEN, tokens=st.tuples(TOKENS, TOKENS), times=st.tuples(TIMES, TIMES))
def test_the_clients_own_priority_comes_before_work_and_age(
    first: int, second: int, tokens: tuple[int, int], times: tuple[float, float]
) -> None:
    values = [
        told(asked(size, priority=given), size, now_s)
        for given, size, now_s in zip((first, second), tokens, times, strict=True)
    ]
    assert all(value is not None and -(2**63) <= value < 2**63 for value in values)
    if first != second:
        assert (values[0] < values[1]) == (first < second)  # type: ignore[operator]


@given(tokens=st.integers(1, 200_000), later_s=st.floats(0, 1e6))
def test_a_long_leg_is_overtaken_only_for_a_time_that_its_work_bounds(
    tokens: int, later_s: float
) -> None:
    long, short = told(asked(tokens), tokens), told(asked(1), 1, 1.8e9 + later_s)
    assert long is not None
    assert short is not None
    if later_s * 1000 * AGING > work_ms(tokens, 0) + 2:
        assert long < short


@pytest.mark.parametrize("given", [MAX_GIVEN + 1, -MAX_GIVEN - 1, 10**9])
def test_what_leaves_no_room_is_passed_on_as_the_client_has_it(given: int) -> None:
    assert told(asked(priority=given), 100) is None


def test_a_priority_that_is_no_integer_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        told(asked(priority="high"), 100)
    assert refused.value.status == 400
