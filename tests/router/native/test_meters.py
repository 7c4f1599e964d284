"""What requests add to counters and histograms, natively."""

from collections import Counter
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from kvrouter._native import Buckets, JsonLines, PlanMeter, Settler
from kvrouter.engine import Engine, Identity, Role
from kvrouter.log import Line
from kvrouter.passage import Passage
from kvrouter.plan import Plan, RouteInputs

BOUNDS = [1.0, 2.0]


def planned(why: str, took_s: float, manifest: str | None = "m") -> Passage:
    identity = Identity(("model",), block_tokens=16, manifest=manifest)
    engine = Engine("127.0.0.1:1", Role.DECODE, identity=identity)
    made = Passage(cast("Any", None), cast("Any", None), "id", b"", 10.0)
    made.plan, made.planned_s = Plan(None, engine, 0, why), 10.0 + took_s
    return made


def test_a_plan_is_counted_by_its_reason_and_its_tokens_by_where_they_are() -> None:
    overhead, plans, prompt, hits = Buckets(BOUNDS), {"why": 1}, dict[tuple[()], int](), {"none": 5}
    meter = PlanMeter(overhead, plans, prompt, hits)
    one, other = planned("why", 0.5), planned("other", 1.5)
    assert one.plan is not None
    held = MappingProxyType({one.plan.decode: 2})
    inputs = RouteInputs(100, [], block_tokens=16, matches=held, store_blocks={"m": 3})
    meter.note(one, inputs)
    meter.note(other, RouteInputs(48, [], block_tokens=16, store_blocks={"m": 3, "x": 9}))
    assert (one.hit_engine, one.hit_store) == (32, 16)
    assert (other.hit_engine, other.hit_store) == (0, 48)
    assert plans == {"why": 1}
    meter.count()
    meter.count()
    assert plans == {"why": 2, "other": 1}
    assert prompt == {(): 148}
    assert hits == {"engine": 32, "store": 64, "none": 57}
    assert (overhead.counts, overhead.sum) == ([1, 1, 0], 2.0)


def test_plans_of_ever_other_reasons_are_all_counted() -> None:
    plans: dict[str, int] = {}
    meter = PlanMeter(Buckets(BOUNDS), plans, {}, {})
    reasons = [f"why {number % 20}" for number in range(100)]
    for why in reasons:
        meter.note(planned(why, 0.5), RouteInputs(1, [], block_tokens=16))
    meter.count()
    assert plans == Counter(reasons)


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_whose_manifest_is_unknown_has_nothing_in_the_store(known: bool) -> None:
    hits: dict[str, int] = {}
    meter = PlanMeter(Buckets(BOUNDS), {}, {}, hits)
    one = planned("why", 0.5, manifest=None)
    assert one.plan is not None
    if not known:
        one.plan.decode.identity = None
    meter.note(one, RouteInputs(48, [], block_tokens=16, store_blocks={"m": 3}))
    meter.count()
    assert hits == {"none": 48}


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


def passage(name: str = "id") -> Passage:
    exchange = SimpleNamespace(status=200, path="/", peer="h:1", caller=None)
    return Passage(cast("Any", exchange), cast("Any", None), name, b"", 1.0)


@pytest.mark.parametrize("wrong", [(object(), 3.0), (passage(), "3"), (passage(),), None])
def test_what_is_no_request_is_an_error_that_costs_no_other_its_line(wrong: Any) -> None:
    lines = JsonLines(Line._fields)
    with pytest.raises((AttributeError, TypeError)):
        settler(lines).settle([(passage("a"), 2.0), wrong, (passage("b"), 4.0)], 1e9)
    told = [orjson.loads(line) for line in lines.take().splitlines()]
    assert [line["request_id"] for line in told] == ["a", "b"]
    assert [line["time"] for line in told] == [1e9 + 2, 1e9 + 4]
    assert [line["total_ms"] for line in told] == [1000, 3000]


def test_requests_that_are_traced_are_told() -> None:
    one, other = passage("a"), passage("b")
    other.trace = cast("Any", SimpleNamespace(hex_id="t"))
    assert settler(None).settle([(one, 2.0), (other, 3.0)], 0.0) == [(other, 3.0)]
