"""Numbers over time."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.control.page.window import Growth, Recent, Ring


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_growth_is_that_of_the_last_minute_and_not_of_all_time() -> None:
    growth: Growth[str] = Growth(span_s=60)
    for second in range(200):
        growth.note(float(second), {"n": second * 3.0})
    assert growth.of("n") == 180
    assert growth.covered_s == 60


def test_growth_of_less_than_a_minute_is_all_there_was() -> None:
    growth: Growth[str] = Growth(span_s=60)
    growth.note(0.0, {"n": 5.0})
    growth.note(7.0, {"n": 9.0})
    assert (growth.of("n"), growth.covered_s) == (4.0, 7.0)


def test_a_counter_that_begins_anew_is_no_negative_growth() -> None:
    growth: Growth[str] = Growth()
    growth.note(0.0, {"n": 100.0})
    growth.note(1.0, {"n": 3.0})
    assert growth.of("n") == 0.0
    growth.note(2.0, {"n": 5.0})
    assert growth.of("n") == 2.0


def test_a_counter_that_comes_later_grows_from_nothing() -> None:
    growth: Growth[str] = Growth()
    growth.note(0.0, {})
    growth.note(1.0, {"n": 4.0})
    assert growth.of("n") == 4.0


@given(st.lists(st.floats(0.1, 30), min_size=1, max_size=300))
def test_growth_keeps_no_more_readings_than_the_minute_has(steps: list[float]) -> None:
    growth: Growth[str] = Growth(span_s=60)
    now_s = 0.0
    for step in steps:
        now_s += step
        growth.note(now_s, {"n": now_s})
    assert growth.covered_s <= max(60 + max(1, *steps), sum(steps[:2]), 1)
    assert abs(growth.of("n") - growth.covered_s) < 1e-6


def test_a_ring_forgets_the_oldest_buckets_and_keeps_its_series_of_one_length() -> None:
    ring = Ring(["a", "b"], bucket_s=5, buckets=3)
    for value in (1.0, 2.0, 3.0, 4.0):
        ring.push({"a": value})
    assert ring.series() == {"a": [2.0, 3.0, 4.0], "b": [None, None, None]}


def test_quantiles_are_of_the_last_minute() -> None:
    clock = Clock()
    recent = Recent(clock, span_s=60)
    recent.add(100.0)
    clock.now_s = 61
    for value in range(1, 101):
        recent.add(float(value))
    assert recent.quantiles(0.5, 0.95) == [51.0, 96.0]
    clock.now_s = 200
    assert recent.quantiles(0.5) == [None]


def test_quantiles_are_of_a_bounded_number_of_values() -> None:
    recent = Recent(Clock(), limit=10)
    for value in range(1000):
        recent.add(float(value))
    assert recent.quantiles(0.0) == [990.0]
