"""The benchmark of copy plans measures copies that are right, and its bars can fail."""

import pytest
from benchmarks import copy_plans
from benchmarks.copy_plans import Case, Prepared, cases, judge, measure


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_plans, "COPIED_BYTES", 1 << 20)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_copy_is_made_of_runs_of_the_length_it_is_named_by(case: Case) -> None:
    assert Prepared(case).plan.least_run_bytes == case.run_bytes


def test_what_is_timed_is_the_copy_of_every_byte() -> None:
    ready = Prepared(Case("halved", 256))
    assert ready.written() == bytes([1])
    ready.source[:] = b"\x02" * len(ready.source)
    ready.copy()
    assert ready.written() == bytes([2])


def test_a_figure_that_is_missing_or_too_low_misses_its_bar() -> None:
    assert not any(bar.met for bar in judge({}).values())
    assert {bar.limit for bar in judge({}).values()} == {0.7}
    found = judge({"halved_4096": {"ratio": 0.69}, "turned_4096": {"ratio": 0.71}})
    assert not found["copy_plan_halved_4096"].met
    assert found["copy_plan_turned_4096"].met
    assert "copy_plan_halved_1024" not in found


def test_figures_are_of_both_sides() -> None:
    found = measure(Case("turned", 4096), rounds=2)
    assert set(found) == {"memcpy_gb_per_s", "plan_gb_per_s", "ratio"}
    assert all(value > 0 for value in found.values())
