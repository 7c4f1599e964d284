"""What requests add to counters and histograms, natively."""

import pytest

from kvrouter._native import Buckets, JsonLines, PlanMeter, Settler
from kvrouter.log import Line

BOUNDS = [1.0, 2.0]


def test_a_plan_is_counted_by_its_reason_and_its_tokens_by_where_they_are() -> None:
    overhead, plans, prompt, hits = Buckets(BOUNDS), {"why": 1}, dict[tuple[()], int](), {"none": 5}
    meter = PlanMeter(overhead, plans, prompt, hits)
    meter.note(0.5, "why", 100, 32, 16)
    meter.note(1.5, "other", 48, 0, 48)
    assert plans == {"why": 2, "other": 1}
    assert prompt == {(): 148}
    assert hits == {"engine": 32, "store": 64, "none": 57}
    assert (overhead.counts, overhead.sum) == ([1, 1, 0], 2.0)


def test_buckets_are_what_times_are_put_in() -> None:
    with pytest.raises(TypeError):
        PlanMeter(object(), {}, {}, {})  # type: ignore[arg-type]


def settler(lines: JsonLines | None, parts: int = 6) -> Settler:
    buckets = tuple(Buckets(BOUNDS) for _ in range(parts))
    return Settler(Buckets(BOUNDS), Buckets(BOUNDS), buckets, {}, {}, {}, frozenset(), lines)


def test_requests_are_settled_into_the_fields_of_a_line_and_six_parts() -> None:
    settler(None)
    settler(JsonLines(Line._fields))
    with pytest.raises(ValueError, match="other fields"):
        settler(JsonLines(Line._fields[::-1]))
    with pytest.raises(ValueError, match="six parts"):
        settler(None, parts=5)


def test_what_is_no_request_is_an_error_and_leaves_no_line() -> None:
    lines = JsonLines(Line._fields)
    with pytest.raises(AttributeError):
        settler(lines).settle(object(), 1.0, 1.0)
    assert lines.take() == b""
