"""The benchmark of tenants: its interval, and a short run against real nodes."""

import pytest
from benchmarks.store_tenants import Ratio, measure, ratio


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [(3, 1.0, 3.0), (9, 2.0, 8.0), (11, 3.0, 9.0)],
)
def test_the_interval_holds_the_median_with_nine_chances_in_ten(
    pairs: int, low: float, high: float
) -> None:
    found = ratio([2.0] * pairs, [2.0 * k for k in range(pairs, 0, -1)])
    assert found == Ratio((pairs + 1) / 2, low, high)


def test_both_nodes_store_the_chains_while_another_client_asks() -> None:
    figures = measure(1, 200)
    cells = [(row["tenants"], row["blocks_per_request"]) for row in figures["rows"]]
    assert cells == [(1, 1), (1, 4000), (2, 1), (2, 4000)]
    assert all(0 < row["match_p50_us"] <= row["match_p99_us"] for row in figures["rows"])
    assert all(row["us_per_block"] > 0 for row in figures["rows"])
