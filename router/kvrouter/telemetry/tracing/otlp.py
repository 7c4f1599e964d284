"""Sends traces to a collector with OpenTelemetry's SDK: its batch processor, its OTLP over HTTP.

Imported only by a router that traces. The SDK's environment variables apply: OTEL_SERVICE_NAME,
OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_SCHEDULE_DELAY and the others. No request waits for the
collector.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from kvrouter import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrouter.telemetry.tracing.trace import Trace

MAX_SPANS: Final = 20_480  # most spans that wait or are being sent; each takes about 2 KiB
_NS: Final = 1_000_000_000
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)
_KINDS: Final = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_UNNAMED: Final = "unknown_service"

log = logging.getLogger(__name__)


class Exporter:
    """Gives traces to the SDK, whose thread sends them; `where` names the collector in the log."""

    def __init__(self, resource: Resource, exporter: SpanExporter, where: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("kvrouter", __version__)
        self._counted = _CountingExporter(exporter, where)
        self._processor = BatchSpanProcessor(self._counted, max_queue_size=MAX_SPANS)
        self._taken = 0  # by the event loop; the SDK's thread counts their outcomes
        self._overflowed = 0
        self._closed = False

    def take(self, trace: Trace) -> None:
        """Send `trace` soon; it is dropped if too many spans wait."""
        count = len(trace.spans)
        if self._closed or self._taken + count - self._counted.ended > MAX_SPANS:
            self._overflowed += count
            return
        self._taken += count
        for span in spans_of(trace, self._resource, self._scope):
            self._processor.on_end(span)

    def counts(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Rows of a metric: spans by outcome."""
        yield ("exported",), float(self._counted.exported)
        yield ("dropped",), float(self._overflowed + self._counted.refused)

    def close(self, timeout_s: float) -> None:
        """Send the waiting spans; blocks for at most `timeout_s`. Idempotent."""
        self._closed = True
        ending = threading.Thread(target=self._processor.shutdown, name="traces end", daemon=True)
        ending.start()
        ending.join(timeout_s)


class _CountingExporter(SpanExporter):
    """Counts the spans of an exporter, and logs when the collector fails or recovers.

    Only the SDK's thread calls it.
    """

    def __init__(self, exporter: SpanExporter, where: str) -> None:
        self._exporter = exporter
        self._where = where
        self._accepts = True
        self.exported = 0
        self.refused = 0

    @property
    def ended(self) -> int:
        """Spans that no longer wait."""
        return self.exported + self.refused

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send `spans`."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # of the library
            log.debug("traces: an export failed", exc_info=True)
            result = SpanExportResult.FAILURE
        accepts = result is SpanExportResult.SUCCESS
        if accepts:
            self.exported += len(spans)
        else:
            self.refused += len(spans)
        if accepts != self._accepts:
            self._accepts = accepts
            self._log_change()
        return result

    def shutdown(self) -> None:
        """Close the exporter."""
        self._exporter.shutdown()

    def _log_change(self) -> None:
        if self._accepts:
            log.info("traces: %s accepts spans again", self._where)
        else:
            log.warning(
                "traces: %s accepts no spans; the router drops and counts them "
                "(kvrouter:trace_spans_total)",
                self._where,
            )


def otlp_exporter(endpoint: str, instance: str) -> Exporter:
    """Sends the traces of the router `instance` to `endpoint`, http://HOST:4318/v1/traces."""
    release = __version__
    sends = OTLPSpanExporter(endpoint=endpoint, headers={"user-agent": f"kvrouter/{release}"})
    # From here on `_CountingExporter` logs what matters; the SDK would log each failed batch.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return Exporter(resource_of(instance, release), sends, endpoint)


def resource_of(instance: str, release: str) -> Resource:
    """The description of the router `instance`; the environment may add to it."""
    named = Resource.create({SERVICE_VERSION: release})
    if str(named.attributes.get(SERVICE_NAME, _UNNAMED)).startswith(_UNNAMED):
        named = named.merge(Resource({SERVICE_NAME: "kvrouter"}))
    return named.merge(Resource({"service.instance.id": instance}))


def spans_of(
    trace: Trace, resource: Resource, scope: InstrumentationScope
) -> Iterator[ReadableSpan]:
    """The SDK's spans of a trace."""
    parent, request = trace.parent, trace.request
    state = TraceState.from_header([parent.state]) if parent and parent.state else TraceState()
    own = SpanContext(trace.trace_id, request.span_id, False, _SAMPLED, state)
    above = SpanContext(trace.trace_id, parent.span_id, True, _SAMPLED, state) if parent else None
    moved_s = trace.began_s - request.begun_s
    for span in trace.spans:
        first = span is request
        context = SpanContext(trace.trace_id, span.span_id, False, _SAMPLED, state)
        yield ReadableSpan(
            name=span.name,
            context=own if first else context,
            parent=above if first else own,
            resource=resource,
            attributes=span.attributes,
            kind=_KINDS[span.kind],
            status=_failed(span.error) if span.error else _UNSET,
            start_time=int((span.begun_s + moved_s) * _NS),
            end_time=int((max(span.ended_s, span.begun_s) + moved_s) * _NS),
            instrumentation_scope=scope,
        )


def _failed(error: str) -> Status:
    """The status of an error, as UTF-8: another text would cost its whole batch."""
    return Status(StatusCode.ERROR, error.encode("utf-8", "replace").decode())
