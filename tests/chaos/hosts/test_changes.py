"""Changes are judged by when they were seen, and by what was found before, meanwhile and after."""

from dataclasses import replace

import pytest
from tests.chaos.hosts.changes import Change, problems
from tests.chaos.hosts.hits import HitRates

LOST = Change(
    "tier killed",
    at_s=10,
    until_s=30,
    within_s=(2, 2),
    tier=True,
    loses=True,
    returned_s=16,
    gone_s=1,
    back_s=1,
)


def sampled(*found: int) -> HitRates:
    """Rates of a process that is asked ten times a second, and finds this many of ten."""
    rates, asked, so_far = HitRates(), 0, 0
    for second, now in enumerate(found):
        counters = {"tier asked": asked, "tier found": so_far}
        rates.take("node", counters | {"store asked": asked, "store found": asked})
        rates.sample(second)
        asked, so_far = asked + 10, so_far + now
    return rates


GONE_AND_BACK = sampled(*[9] * 11, *[0] * 6, *range(8), *[8] * 10)


def test_rates_are_those_of_a_time_whatever_comes_before_and_after() -> None:
    assert GONE_AND_BACK.rate("tier", 2, 8) == 0.9
    assert GONE_AND_BACK.rate("tier", 11, 16) == 0
    assert GONE_AND_BACK.rate("tier", 8.2, 8.9) is None


def test_a_process_that_starts_again_counts_from_nothing() -> None:
    rates = HitRates()
    for second, (asked, found) in enumerate([(100, 50), (110, 60), (10, 0), (20, 10)]):
        rates.take("node", {"tier asked": asked, "tier found": found})
        rates.sample(second)
    assert rates.rate("tier", 0, 1) == 1
    assert rates.rate("tier", 0, 3) == 20 / 30


def test_a_tier_that_was_seen_to_go_and_come_and_that_fills_again_is_well() -> None:
    assert list(problems([LOST], GONE_AND_BACK)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (replace(LOST, gone_s=2.5), "tier killed: seen gone after 2.50 s, not within 2 s"),
        (replace(LOST, back_s=None), "tier killed: seen back never, not within 2 s"),
    ],
)
def test_what_is_seen_too_late_is_a_problem(change: Change, problem: str) -> None:
    assert list(problems([change], GONE_AND_BACK)) == [problem]


def test_hits_in_a_tier_that_is_away_are_a_problem() -> None:
    (problem,) = problems([LOST], sampled(*[9] * 40))
    assert problem == "tier killed: 90% found in a tier that was away"


def test_hits_that_do_not_come_back_are_a_problem() -> None:
    (problem,) = problems([LOST], sampled(*[9] * 11, *[0] * 29))
    assert problem == "tier killed: found in the tier: 90% before, 0% after"


def test_what_is_not_lost_must_be_found_again_mostly() -> None:
    stalled = replace(LOST, loses=False)
    (problem,) = problems([stalled], sampled(*[9] * 11, *[0] * 6, *[4] * 20))
    assert problem == "tier killed: found in the tier: 90% before, 40% after"
