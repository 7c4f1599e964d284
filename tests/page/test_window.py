"""What counters grew by."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.control.page.snapshot import Growth


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_growth_is_that_of_the_last_minute_and_not_of_all_time() -> None:
    growth: Growth[str] = Growth()
    for second in range(200):
        growth.note(float(second), {"n": second * 3.0})
    assert growth.of("n") == 180
    assert growth.covered_s == 60


def test_growth_of_less_than_a_minute_is_all_there_was() -> None:
    growth: Growth[str] = Growth()
    growth.note(0.0, {"n": 5.0})
    growth.note(7.0, {"n": 9.0})
    assert (growth.of("n"), growth.covered_s) == (4.0, 7.0)


def test_a_counter_that_comes_later_grows_from_nothing() -> None:
    growth: Growth[str] = Growth()
    growth.note(0.0, {})
    growth.note(1.0, {"n": 4.0})
    assert growth.of("n") == 4.0


@given(st.lists(st.floats(0.1, 30), min_size=1, max_size=300))
def test_growth_keeps_no_more_readings_than_the_minute_has(steps: list[float]) -> None:
    growth: Growth[str] = Growth()
    now_s = 0.0
    for step in steps:
        now_s += step
        growth.note(now_s, {"n": now_s})
    assert growth.covered_s <= max(60 + max(steps), sum(steps[:2]))
    assert abs(growth.of("n") - growth.covered_s) < 1e-6
