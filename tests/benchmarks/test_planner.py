"""The planner benchmark sends what it says, and counts what it measured."""

import asyncio
import random
import statistics
from pathlib import Path

import pytest
from benchmarks.planner import SETUPS, Setup, run
from benchmarks.planner_client import Reply
from benchmarks.planner_figures import Figures, figures, paired, unevenness
from benchmarks.planner_load import BURST_S, CYCLE_S, arrivals, rate_of_load, requests


def test_the_same_seed_gives_the_same_requests_and_another_one_others() -> None:
    assert requests(1, 20.0, 5.0) == requests(1, 20.0, 5.0)
    assert requests(1, 20.0, 5.0) != requests(2, 20.0, 5.0)


def test_bursts_are_three_times_the_mean_rate_which_they_leave_as_it_is() -> None:
    times = arrivals(random.Random(1), 20_000, 20.0)
    assert times[-1] == pytest.approx(1000, rel=0.05)
    bursts = sum(at % CYCLE_S < BURST_S for at in times)
    assert bursts / len(times) == pytest.approx(3 * BURST_S / CYCLE_S, rel=0.05)


def test_the_load_is_what_prefill_engines_have_to_compute_at_best() -> None:
    per_s = rate_of_load(0.7, 4, 0.0001)
    asks = requests(7, 200.0, per_s)
    busy_s = 0.0001 * sum(ask.missing for ask in asks) / 4
    assert busy_s / asks[-1].at_s == pytest.approx(0.7, rel=0.1)


def test_a_turn_begins_with_an_earlier_prompt_and_misses_only_the_rest() -> None:
    asks = requests(3, 200.0, 5.0)
    for number, ask in enumerate(asks):
        held = len(ask.prompt) - ask.missing
        if held:
            assert any(other.prompt[:held] == ask.prompt[:held] for other in asks[:number])
    assert statistics.fmean(len(ask.prompt) > ask.missing for ask in asks) > 0.5


def test_unevenness_is_one_where_all_hold_the_same_and_weighs_samples_by_load() -> None:
    assert unevenness([[1, 1, 1, 1], [5, 5, 5, 5]]) == 1.0
    assert unevenness([[4, 0, 0, 0]]) == 4.0
    assert unevenness([[4, 0, 0, 0], [100, 100, 100, 100]]) < 1.1


def test_differences_are_between_the_same_requests() -> None:
    before = Figures([1.0 + request for request in range(100)])
    after = Figures([first - 0.25 for first in before.first_s])
    difference = paired(before, after)
    assert (difference.median_ms, difference.low_ms, difference.high_ms) == (-250, -250, -250)
    assert difference.mean_ms == pytest.approx(-250)


def test_the_interval_of_a_median_holds_it_nine_times_of_ten() -> None:
    chance, held = random.Random(1), 0
    for _ in range(300):
        before = Figures([0.0] * 101)
        found = paired(before, Figures([chance.gauss(0.0, 1.0) for _ in range(101)]))
        held += found.low_ms <= 0 <= found.high_ms
    assert 0.85 < held / 300 < 0.97


def test_what_comes_before_the_warm_up_has_ended_is_not_counted() -> None:
    asks = requests(1, 20.0, 2.0)
    replies = [Reply(0.0, first_s=ask.at_s, whole_s=1.0) for ask in asks]
    samples = [(at / 10, [at / 10, 0.0]) for at in range(400)]
    found = figures(asks, replies, samples, 10.0)
    assert found.first_s == [ask.at_s for ask in asks if ask.at_s >= 10.0]
    assert all(10.0 <= held[0] <= asks[-1].at_s for held in found.held)


@pytest.mark.benchmarks
@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[-1]], ids=lambda setup: setup.name)
def test_real_processes_answer_all_requests(setup: Setup, tmp_path: Path) -> None:
    asks = requests(1, 3.0, 4.0)
    found = asyncio.run(run(setup, asks, tmp_path, warm_up_s=0.0, engines=1))
    assert len(found.first_s) == len(asks)
    assert all(seconds > 0 for seconds in found.first_s)
    assert all(held >= 0 for sample in found.held for held in sample)
