"""The traces benchmark measures traces as routers make them, and its bar can be missed."""

from benchmarks.traces import BAR, cell, noted, taker
from tests.fakes.sdk_spans import sdk_spans

from kvrouter.tracing.otlp import OtlpSender, resource_of


def test_a_trace_is_as_a_router_notes_it() -> None:
    one, other = noted(2)
    names = ["request", "tokenise", "plan", "prefill", "landing", "decode"]
    assert [span.name for span in one.spans] == [f"kvrouter.{name}" for name in names]
    assert sum(len(span.attributes) for span in one.spans) > 40
    assert one.trace_id != other.trace_id
    assert len(sdk_spans([one, other], resource_of("h:1", "1"), "1")) == 2 * len(names)


def test_the_collector_of_a_measurement_takes_traces() -> None:
    with taker() as url:
        assert OtlpSender(url, "h:1").send(noted(3))


def test_a_ratio_is_the_median_of_those_of_each_round() -> None:
    found = cell("send", 64, [(100.0, 10.0), (200.0, 60.0), (300.0, 60.0)])
    assert (found.sdk_us, found.own_us, found.ratio) == (200.0, 60.0, 0.2)
    assert found.ratio <= BAR < cell("send", 64, [(100.0, 30.0)]).ratio
