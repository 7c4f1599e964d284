"""Token buckets: never more than the rate allows, never less than it promises."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.access.callers import Bucket

RATES = st.floats(0.01, 10_000)
BURSTS = st.floats(1, 10_000)
STEPS = st.lists(st.tuples(st.floats(0, 100), st.floats(0.5, 5_000)), max_size=60)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(RATES, BURSTS, STEPS)
def test_in_any_time_no_more_passes_than_the_rate_and_one_burst(
    rate: float, burst: float, steps: list[tuple[float, float]]
) -> None:
    clock = Clock()
    bucket = Bucket(rate, burst, clock)
    taken: list[tuple[float, float]] = []
    for pause_s, amount in steps:
        clock.now_s += pause_s
        if not bucket.take(amount):
            taken.append((clock.now_s, amount))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            elapsed_s = taken[last][0] - taken[first][0]
            passed = sum(amount for _, amount in taken[first:last])
            room = burst + rate * elapsed_s
            # What was there when the last one began; that one alone may exceed the burst.
            assert passed + min(taken[last][1], burst) <= room * (1 + 1e-6)


@given(RATES, BURSTS, STEPS)
def test_who_waits_as_long_as_told_is_served_and_who_waits_less_is_not(
    rate: float, burst: float, steps: list[tuple[float, float]]
) -> None:
    clock = Clock()
    bucket = Bucket(rate, burst, clock)
    for pause_s, amount in steps:
        clock.now_s += pause_s
        wait_s = bucket.take(amount)
        if wait_s:
            clock.now_s += wait_s * 0.99
            assert bucket.take(amount)
            clock.now_s += wait_s * 0.0101
            assert not bucket.take(amount)


@given(RATES, BURSTS, st.floats(1, 100_000))
def test_a_debt_is_paid_before_anything_passes(rate: float, burst: float, debt: float) -> None:
    clock = Clock()
    bucket = Bucket(rate, burst, clock)
    bucket.take(burst)
    bucket.charge(debt)
    wait_s = bucket.take(burst)
    assert wait_s * rate > debt * 0.999
    clock.now_s += wait_s * 1.001
    assert not bucket.take(burst)


def test_a_bucket_never_holds_more_than_its_burst_however_long_it_rests() -> None:
    clock = Clock()
    bucket = Bucket(1, 3, clock)
    clock.now_s += 1e9
    assert [bucket.take(1) for _ in range(3)] == [0, 0, 0]
    assert bucket.take(1) == 1


def test_another_rate_holds_from_now_on_and_keeps_what_was_used() -> None:
    clock = Clock()
    bucket = Bucket(1, 10, clock)
    bucket.take(10)
    bucket.adjust(5, 5)
    assert bucket.take(5) == 1
    clock.now_s += 1
    assert bucket.take(5) == 0
