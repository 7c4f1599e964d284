"""Traces as OpenTelemetry's SDK sends them: OTLP over HTTP. The only module that imports it.

It is imported in the process of a router that traces, and used in the exporter's thread alone.
What the SDK reads of the environment (OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, ...) holds.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

if TYPE_CHECKING:
    from kvrouter.tracing.trace import Span, Trace

_KINDS: Final = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)
_NS: Final = 1_000_000_000
_UNNAMED: Final = "unknown_service"

log = logging.getLogger(__name__)


class OtlpSender:
    """Sends traces to one collector; to be called in one thread.

    Args:
        endpoint: URL of its traces, as http://HOST:4318/v1/traces.
        instance: which router this is, as HOST:PORT.
        exporter: another way out than OTLP over HTTP.
    """

    def __init__(self, endpoint: str, instance: str, exporter: SpanExporter | None = None) -> None:
        _quieten()
        self._exporter = exporter or OTLPSpanExporter(endpoint=endpoint)
        self._scope = InstrumentationScope("kvrouter", version("kvrouter"))
        named = Resource.create({SERVICE_VERSION: version("kvrouter")})
        if str(named.attributes.get(SERVICE_NAME, _UNNAMED)).startswith(_UNNAMED):
            named = named.merge(Resource({SERVICE_NAME: "kvrouter"}))
        self._resource = named.merge(Resource({"service.instance.id": instance}))

    def send(self, traces: list[Trace]) -> bool:
        """Whether the collector took all of them."""
        try:
            spans = [span for trace in traces for span in self._spans(trace)]
            return self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # the thread must live on, whatever the library or a proxy does
            log.debug("traces: they could not be sent", exc_info=True)
            return False

    def stop(self) -> None:
        """Give up what is under way."""
        self._exporter.shutdown()

    def _spans(self, trace: Trace) -> list[ReadableSpan]:
        state = TraceState.from_header([trace.parent.state]) if trace.parent else TraceState()
        moved_s = trace.began_s - trace.request.begun_s

        def context(span_id: int, *, remote: bool = False) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, remote, _SAMPLED, state)

        own = {span.span_id for span in trace.spans}

        def readable(span: Span) -> ReadableSpan:
            above = span.parent_id
            return ReadableSpan(
                name=span.name,
                context=context(span.span_id),
                parent=context(above, remote=above not in own) if above else None,
                resource=self._resource,
                attributes=span.attributes,
                kind=_KINDS[span.kind],
                status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
                start_time=int((span.begun_s + moved_s) * _NS),
                end_time=int((max(span.ended_s, span.begun_s) + moved_s) * _NS),
                instrumentation_scope=self._scope,
            )

        return [readable(span) for span in trace.spans]


def _quieten() -> None:
    """What a collector does not take is counted and told once; the library says it each time."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
