"""What collectors get of a trace is what OpenTelemetry's own SDK would send of it."""

from random import Random

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.sdk.resources import Resource
from tests.fakes.sdk_spans import sdk_request

from kvrouter.engine import Engine, Role
from kvrouter.tracing.context import Parent
from kvrouter.tracing.encode import MAX_KEPT, Encoder
from kvrouter.tracing.otlp import resource_of
from kvrouter.tracing.trace import Trace, Value

VALUES: list[Value] = [
    "",
    "a",
    "ünï ☃ \0",
    "x" * 500,
    True,
    False,
    0,
    1,
    -1,
    2**63 - 1,
    -(2**63),
    0.0,
    -0.0,
    1.0,
    0.1,
    1e300,
    float("inf"),
    float("nan"),
    (),
    ("a", "b"),
]
PARENT = Parent(2**128 - 1, 2**64 - 1, True, "rojo=00f067,congo=t61rc")


def trace_of(parent: Parent | None, seed: int = 1) -> Trace:
    random = Random(seed)
    trace = Trace(parent, parent.trace_id if parent else random.getrandbits(128), random)
    trace.note("kvrouter.plan", 1.5, 2.25, {f"value.{n}": value for n, value in enumerate(VALUES)})
    trace.leg("kvrouter.prefill", Engine("127.0.0.1:8000", Role.PREFILL)).end()
    failed = trace.leg("kvrouter.decode", Engine("127.0.0.1:8001", Role.DECODE))
    failed.error = "it answers 500: ☃"
    trace.note("kvrouter.landing", 3.0, 2.0, {})  # a clock that goes back
    trace.request.attributes = {"kvrouter.stream": True, "kvrouter.attempts": 1, "e2e": 0.25}
    return trace


def spans_of(request: ExportTraceServiceRequest) -> list[WireSpan]:
    return list(request.resource_spans[0].scope_spans[0].spans)


def told(span: WireSpan) -> dict[str, bytes]:
    """Attributes by name; as bytes, since a number may be none."""
    found = {one.key: one.value.SerializeToString() for one in span.attributes}
    assert len(found) == len(span.attributes)
    return found


def bare(request: ExportTraceServiceRequest) -> ExportTraceServiceRequest:
    """All but the attributes of spans, whose order means nothing."""
    copy = ExportTraceServiceRequest()
    copy.CopyFrom(request)
    for span in spans_of(copy):
        span.ClearField("attributes")
    return copy


@pytest.mark.parametrize("parent", [None, PARENT], ids=["none", "parent"])
def test_the_encoder_says_what_the_sdk_says(parent: Parent | None) -> None:
    resource = Resource({"service.name": "s", "n": 1, "x": 0.5, "on": True, "list": ("a", "b")})
    traces = [trace_of(parent), trace_of(None, 2)]
    encoder = Encoder(resource.attributes, "1.2")
    theirs = sdk_request(traces, resource, "1.2")
    for _ in range(2):  # made the first time, kept the second
        ours = ExportTraceServiceRequest.FromString(encoder.encode(traces))
        assert bare(ours) == bare(theirs)
        for own, other in zip(spans_of(ours), spans_of(theirs), strict=True):
            assert told(own) == told(other)


def test_an_integer_that_otlp_has_no_place_for_is_left_out() -> None:
    trace = trace_of(None)
    trace.request.attributes = {"big": 2**63, "small": 1}
    request, *_ = spans_of(
        ExportTraceServiceRequest.FromString(Encoder({}, "1").encode([trace, trace_of(None)]))
    )
    assert [one.key for one in request.attributes] == ["small"]


def test_text_that_utf_8_cannot_say_costs_no_trace() -> None:
    trace = trace_of(None)
    trace.request.attributes = {"a": "x\ud800"}
    trace.request.error = "y\udcff"
    request, *_ = spans_of(
        ExportTraceServiceRequest.FromString(Encoder({"n": "\udcff"}, "1").encode([trace]))
    )
    assert [one.value for one in request.attributes] == [AnyValue(string_value="x?")]
    assert request.status.message == "y?"


def test_what_is_kept_is_bounded() -> None:
    encoder = Encoder({}, "1")
    trace = trace_of(None)
    trace.request.attributes = {f"n{n}": n for n in range(MAX_KEPT + 10)}
    encoder.encode([trace])
    assert encoder._attribute.cache_info().currsize == MAX_KEPT
    trace.request.attributes = {"n0": 0}
    request, *_ = spans_of(ExportTraceServiceRequest.FromString(encoder.encode([trace])))
    assert [one.value.int_value for one in request.attributes] == [0]


def test_a_router_is_named_by_the_environment_or_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = resource_of("h:1", "1.2").attributes
    assert (plain["service.name"], plain["service.version"]) == ("kvrouter", "1.2")
    assert plain["service.instance.id"] == "h:1"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    named = resource_of("h:1", "1.2").attributes
    assert (named["service.name"], named["deployment.environment"]) == ("mine", "test")
