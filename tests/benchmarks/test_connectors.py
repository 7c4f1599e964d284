"""The figures and bars of `benchmarks.connectors`; its engines run by hand."""

import pytest
from benchmarks.connectors.judge import (
    BARS,
    OURS,
    Ratio,
    bar_lines,
    figures,
    ratio,
    table,
    verdict,
)
from benchmarks.connectors.measure import Plan, Record
from benchmarks.connectors.peers import LMCACHE, MOONCAKE
from benchmarks.connectors.rig import Answer

HIT = BARS[0]  # at most what LMCache takes


def hits_of(ours: list[float], theirs: list[float]) -> dict[str, dict[str, list[float]]]:
    return {"hit": {OURS: ours, LMCACHE: theirs}}


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [(3, 1.0, 3.0), (9, 2.0, 8.0), (11, 3.0, 9.0)],
)
def test_the_interval_holds_the_median_with_nine_chances_in_ten(
    pairs: int, low: float, high: float
) -> None:
    found = ratio([2.0] * pairs, [2.0 * k for k in range(pairs, 0, -1)])
    assert found == Ratio((pairs + 1) / 2, low, high)


def test_ratios_are_of_pairs() -> None:
    found = figures(hits_of([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]))
    assert found["hit"][LMCACHE]["ours_to_it"]["median"] == 0.5
    assert "ours_to_it" not in found["hit"][OURS]
    assert f"| hit | {LMCACHE} | 6000.0 (2000.0 to 40000.0) | 0.500 (0.500 to 0.500) |" in table(
        found
    )


def test_a_bar_is_missed_only_if_its_whole_interval_lies_beyond_it() -> None:
    assert verdict(HIT, figures(hits_of([0.9] * 9, [1.0] * 9))) == "met"
    assert verdict(HIT, figures(hits_of([1.1] * 9, [1.0] * 9))) == "MISSED"
    assert verdict(HIT, figures(hits_of([0.9] * 4 + [1.1] * 5, [1.0] * 9))) == "open"


def test_a_peer_that_fails_is_named_with_its_reason_and_has_no_times() -> None:
    record = Record()
    answers = {name: Answer(1.0, [5], {}) for name in (OURS, LMCACHE, MOONCAKE)}
    record.add("hit", answers)
    record.skip(LMCACHE, RuntimeError("no wheel\nfor this machine"))
    found = figures(record.times)
    verdicts = {bar.name: verdict(bar, found) for bar in BARS}
    assert verdicts[HIT.name] == "skipped"
    assert f"skipped {LMCACHE}: no wheel" in bar_lines(verdicts, record.skipped)
    assert list(found["hit"]) == [OURS, MOONCAKE]


def test_prompts_with_other_tokens_in_one_set_up_are_counted() -> None:
    record = Record()
    record.add("hit", {OURS: Answer(1.0, [5], {}), LMCACHE: Answer(1.0, [5], {})})
    record.add("hit", {OURS: Answer(1.0, [5], {}), LMCACHE: Answer(1.0, [6], {})})
    assert record.different == 1


def test_only_whole_blocks_are_reused_and_never_the_whole_prompt() -> None:
    assert Plan(1, 1, 1, prompt_tokens=3000).reused_tokens == 2944
    assert Plan(1, 1, 1, prompt_tokens=128).reused_tokens == 64
