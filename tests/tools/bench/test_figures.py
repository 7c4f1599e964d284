"""Figures of a benchmark run, of made-up requests."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.tools.bench.figures import Figures, percentile
from kvrouter.tools.bench.legs import LegFigures, RouterLegs
from kvrouter.tools.bench.load import prompts
from kvrouter.tools.bench.settings import BenchSettings
from kvrouter.tools.timed_stream import TimedAnswer

np = pytest.importorskip("numpy")
SETTINGS = BenchSettings(percentile_metrics=("ttft", "tpot", "itl", "e2el"))


def timed(start_s: float, ttft_s: float, gaps_s: Sequence[float], tokens: int) -> TimedAnswer:
    """A request that went well."""
    latency_s = ttft_s + sum(gaps_s)
    return TimedAnswer(start_s, 10, ttft_s, list(gaps_s), latency_s, tokens)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=50),
    st.floats(0.1, 100.0),
)
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_times_are_means_over_requests_and_gaps_that_went_well() -> None:
    runs = [
        timed(100.0, 0.5, [0.1, 0.3], 3),
        timed(100.2, 1.5, [0.2], 3),  # two tokens came in one event
        timed(100.3, 0.1, [], 1),
        TimedAnswer(100.0, 10, error="503: full"),
    ]
    result = Figures.of(runs, 2.0).as_json(SETTINGS)
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 7)
    assert result["output_throughput"] == 3.5
    assert result["mean_ttft_ms"] == pytest.approx(700)
    assert result["mean_tpot_ms"] == pytest.approx((200 + 100) / 2)  # one token has none
    assert result["mean_itl_ms"] == pytest.approx(200)
    assert result["p99_e2el_ms"] == pytest.approx(np.percentile([900, 1700, 100], 99))


def test_the_peaks_count_whole_seconds_from_the_first_request() -> None:
    runs = [timed(50.0, 0.25, [0.125] * 9, 10), timed(50.5, 0.25, [0.5, 0.5], 3)]
    figures = Figures.of(runs, 2.0)
    assert figures.max_concurrent_requests == 2
    assert figures.max_output_tokens_per_s == 6 + 1  # those at 50.25 to 50.875, and at 50.75


def test_a_run_in_which_all_failed_has_figures_too() -> None:
    figures = Figures.of([TimedAnswer(1.0, 10, error="no token came")], 1.0)
    assert figures.failed == 1
    assert "Mean TTFT (ms):                          0.00      " in figures.rows(SETTINGS)


def test_legs_are_what_grew_between_two_scrapes() -> None:
    page = "kvrouter:handoff_seconds_count {c}\nkvrouter:handoff_seconds_sum {s}\n"
    before = RouterLegs.read(page.format(c=4, s=2.0))
    after = RouterLegs.read(page.format(c=6, s=2.5) + "vllm:other_count 3\n")
    assert after.since(before) == {"landing": LegFigures(2, 250.0)}
    assert "Mean landing (ms):                       250.00    " in after.rows(before)
    assert before.rows(before) == []


def test_prompts_are_the_same_for_the_same_seed_and_share_their_prefix() -> None:
    settings = BenchSettings(num_prompts=3, random_input_len=5, random_prefix_len=4)
    first, second, third = prompts(settings)
    assert [first, second, third] == list(prompts(settings))
    assert first[:4] == second[:4] == third[:4]
    assert first[4:] != second[4:]
    assert all(1000 <= token < 2000 for token in first)
    assert next(prompts(settings.model_copy(update={"seed": 1}))) != first
