"""Traces on their way to a collector: what the SDK is given, and what waits for nobody."""

import threading
from collections.abc import Sequence
from random import Random

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvrouter.telemetry.tracing.otlp import MAX_SPANS, Exporter, resource_of, spans_of
from kvrouter.telemetry.tracing.trace import Parent, Trace

PATIENCE_S = 30.0
BATCH = 512
PARENT = Parent(2**128 - 1, 2**64 - 1, True, "rojo=00f067,congo=t61rc")


def trace_of(parent: Parent | None = None) -> Trace:
    random = Random(1)
    return Trace(parent, parent.trace_id if parent else random.getrandbits(128), random)


def on_the_wire(trace: Trace) -> list[WireSpan]:
    spans = list(spans_of(trace, Resource({}), InstrumentationScope("kvrouter", "1")))
    return list(encode_spans(spans).resource_spans[0].scope_spans[0].spans)


@pytest.mark.parametrize("parent", [None, PARENT], ids=["none", "parent"])
def test_spans_hang_below_the_request_and_the_request_below_its_parent(
    parent: Parent | None,
) -> None:
    trace = trace_of(parent)
    trace.note("kvrouter.plan", 1.5, 2.25, {"kvrouter.plan": "prefill"})
    trace.leg("kvrouter.prefill", host="127.0.0.1", port=8000, engine="127.0.0.1:8000").end()
    request, *parts = on_the_wire(trace)
    remote = SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    assert request.parent_span_id == (b"\xff" * 8 if parent else b"")
    assert [bool(span.flags & remote) for span in (request, *parts)] == [bool(parent), False, False]
    assert {span.parent_span_id for span in parts} == {request.span_id}
    assert {span.trace_id for span in (request, *parts)} == {trace.trace_id.to_bytes(16)}
    assert {span.trace_state for span in (request, *parts)} == {parent.state if parent else ""}


def test_a_span_is_as_long_as_it_took_and_never_shorter_than_nothing() -> None:
    trace = trace_of()
    trace.note("kvrouter.plan", 1.5, 2.25, {})
    trace.note("kvrouter.landing", 3.0, 2.0, {})  # a clock that goes back
    _, plan, landing = on_the_wire(trace)
    assert plan.end_time_unix_nano - plan.start_time_unix_nano == pytest.approx(75e7, abs=1e3)
    assert landing.end_time_unix_nano == landing.start_time_unix_nano


def test_text_that_utf_8_cannot_say_costs_no_trace() -> None:
    trace = trace_of()
    trace.request.error = "y\udcff"
    (request,) = on_the_wire(trace)
    assert request.status.message == "y?"


class Sends(SpanExporter):
    """An exporter that notes its batches, and may hang or fail."""

    def __init__(self, *, fails: bool = False, hangs: bool = False) -> None:
        self.fails = fails
        self.go = threading.Event()
        if not hangs:
            self.go.set()
        self.asked = threading.Event()
        self.batches: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.go.wait(PATIENCE_S)
        self.batches.append(len(spans))
        if self.fails:
            raise OSError("no way")
        return SpanExportResult.SUCCESS


def sending(exporter: SpanExporter) -> Exporter:
    return Exporter(Resource({}), exporter, "http://c")


def new_trace() -> Trace:
    trace = trace_of()
    trace.note("kvrouter.plan", 1.0, 2.0, {})
    return trace


def counts(exporter: Exporter) -> dict[str, float]:
    return {labels[0]: value for labels, value in exporter.counts()}


def test_traces_are_sent_in_batches_and_all_of_them_at_the_end() -> None:
    sends = Sends()
    exporter = sending(sends)
    for _ in range(BATCH + 5):
        exporter.take(new_trace())
    exporter.close(PATIENCE_S)
    assert sum(sends.batches) == 2 * (BATCH + 5)
    assert max(sends.batches) <= BATCH
    assert counts(exporter) == {"exported": 2 * (BATCH + 5), "dropped": 0}


def test_a_collector_that_hangs_costs_no_memory_and_no_time() -> None:
    sends = Sends(hangs=True)
    exporter = sending(sends)
    for _ in range(MAX_SPANS // 2 + 10):
        exporter.take(new_trace())  # this would never return if it waited
    assert sends.asked.wait(PATIENCE_S)
    assert counts(exporter) == {"exported": 0, "dropped": 20}
    exporter.close(0.01)
    assert counts(exporter)["exported"] == 0
    sends.go.set()


def test_what_is_refused_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sends = Sends(fails=True)
    exporter = sending(sends)
    for _ in range(BATCH):
        exporter.take(new_trace())
    exporter.close(PATIENCE_S)
    assert len(sends.batches) > 1
    assert counts(exporter) == {"exported": 0, "dropped": 2 * BATCH}
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "traces: http://c accepts no spans"
    ]
    exporter.take(new_trace())
    assert counts(exporter)["dropped"] == 2 * BATCH + 2  # it is closed


def test_a_router_is_named_by_the_environment_or_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = resource_of("h:1", "1.2").attributes
    assert (plain["service.name"], plain["service.version"]) == ("kvrouter", "1.2")
    assert plain["service.instance.id"] == "h:1"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    named = resource_of("h:1", "1.2").attributes
    assert (named["service.name"], named["deployment.environment"]) == ("mine", "test")
