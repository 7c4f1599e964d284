"""The benchmark of the index fills it as it says."""

from benchmarks.prefix_index import CHAIN, measure


def test_all_chains_fit_and_their_matches_are_timed() -> None:
    found = measure(holders=8, blocks=12 * CHAIN)
    assert found["forgotten"] == 0
    assert 9 * CHAIN < found["blocks"] <= 12 * CHAIN
    assert found["bytes_a_block"] <= found["bytes_a_block_at_most"] * 2
    assert 0 < found["few_p50_us"] <= found["few_p99_us"]
