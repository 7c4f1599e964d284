"""Traces as OpenTelemetry's own SDK encodes them: what kvrouter's encoder is held to."""

from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from kvrouter.tracing.trace import Trace

NS = 1_000_000_000
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
UNSET = Status(StatusCode.UNSET)


def sdk_request(traces: list[Trace], resource: Resource, release: str) -> ExportTraceServiceRequest:
    """What the SDK's exporter would send."""
    return encode_spans(sdk_spans(traces, resource, release))


def sdk_spans(traces: list[Trace], resource: Resource, release: str) -> list[ReadableSpan]:
    """What the SDK's exporter would be given."""
    scope = InstrumentationScope("kvrouter", release)
    return [span for trace in traces for span in readable(trace, resource, scope)]


def readable(
    trace: Trace, resource: Resource, scope: InstrumentationScope
) -> Iterator[ReadableSpan]:
    state = TraceState.from_header([trace.parent.state]) if trace.parent else TraceState()
    moved_s = trace.began_s - trace.request.begun_s
    ours = {span.span_id for span in trace.spans}
    for span in trace.spans:
        above = span.parent_id
        parent = SpanContext(trace.trace_id, above, above not in ours, SAMPLED, state)
        yield ReadableSpan(
            name=span.name,
            context=SpanContext(trace.trace_id, span.span_id, False, SAMPLED, state),
            parent=parent if above else None,
            resource=resource,
            attributes=span.attributes,
            kind=SpanKind[span.kind.upper()],
            status=Status(StatusCode.ERROR, span.error) if span.error else UNSET,
            start_time=int((span.begun_s + moved_s) * NS),
            end_time=int((max(span.ended_s, span.begun_s) + moved_s) * NS),
            instrumentation_scope=scope,
        )
