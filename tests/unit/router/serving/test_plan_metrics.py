"""What one request adds to the metrics when it is planned."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.prefix.lower import Loadable
from kvrouter.routing.plan import Plan, RouteInputs, Why
from kvrouter.serving.legs.inputs import hits, note_plan
from kvrouter.serving.request.context import RequestContext, Timing
from kvrouter.telemetry.metrics import Metrics

HITS = "kvrouter:prefix_hit_tokens_total{"


def engine(manifest: str | None = "m") -> Engine:
    identity = Identity(("model",), block_tokens=16, manifest=manifest)
    return Engine("127.0.0.1:1", Role.DECODE, identity=identity)


def planned(took_s: float) -> RequestContext:
    made = RequestContext(cast("Any", None), "id", b"", Timing(10.0))
    made.timing.planned_s, made.model = 10.0 + took_s, "m"
    return made


def test_a_plan_is_counted_by_its_reason_and_its_tokens_by_where_they_are() -> None:
    metrics, decode = Metrics(), engine()
    one, other = planned(0.5), planned(1.5)
    lower, stored = {decode: Loadable(3, 0.2)}, {"m": 5}
    held = RouteInputs(
        100, [], block_tokens=16, matches={decode: 2}, lower=lower, store_blocks=stored
    )
    note_plan(one, Plan(None, decode, 0, Why.PREFILL), held, metrics)
    away = RouteInputs(48, [], block_tokens=16, store_blocks={"m": 3, "x": 9})
    note_plan(other, Plan(None, decode, 0, Why.LITTLE_MISSING), away, metrics)
    assert (one.route.hit_engine, one.route.hit_lower, one.route.hit_store) == (32, 16, 32)
    assert (other.route.hit_engine, other.route.hit_lower, other.route.hit_store) == (0, 0, 48)
    assert metrics.plans == {"prefill": 1, "little missing": 1}
    counted = metrics.of("m")
    assert (counted.prompt_tokens, counted.hit_engine, counted.hit_store) == (148, 32, 80)
    page = metrics.page().decode()
    assert 'kvrouter:prefix_hit_tokens_total{model="m",source="lower"} 16.0' in page
    assert 'kvrouter:prefix_hit_tokens_total{model="m",source="none"} 20.0' in page
    assert (metrics.overhead.count, metrics.overhead.buckets.sum) == (2, 2.0)


def test_an_engine_whose_manifest_is_unknown_has_nothing_in_the_store() -> None:
    inputs = RouteInputs(48, [], block_tokens=16, store_blocks={"m": 3})
    stranger = Engine("127.0.0.1:1", Role.DECODE)
    assert hits(inputs, engine(manifest=None)) == (0, 0, 0)
    assert hits(inputs, stranger) == (0, 0, 0)


@given(prompt=st.integers(0, 500), blocks=st.tuples(*[st.integers(0, 9)] * 3))
def test_hits_and_misses_of_a_prompt_add_up_to_it(
    prompt: int, blocks: tuple[int, int, int]
) -> None:
    metrics, decode = Metrics(), engine()
    own, lower, stored = (min(each, prompt // 16) for each in blocks)
    inputs = RouteInputs(
        prompt,
        [],
        block_tokens=16,
        matches={decode: own},
        lower={decode: Loadable(lower, 0.0)},
        store_blocks={"m": stored},
    )
    note_plan(planned(0.0), Plan(None, decode, 0, Why.PREFILL), inputs, metrics)
    rows = [row for row in metrics.page().decode().splitlines() if row.startswith(HITS)]
    counts = [float(row.rpartition(" ")[2]) for row in rows]
    assert (sum(counts), min(counts) >= 0) == (prompt, True)
