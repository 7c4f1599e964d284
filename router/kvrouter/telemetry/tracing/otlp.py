"""Traces on their way to a collector, through OpenTelemetry's SDK: its batches, its OTLP over HTTP.

OpenTelemetry is known to this module alone, which is imported in the process of a router that
traces. What the SDK reads of the environment holds: OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_BSP_SCHEDULE_DELAY and the rest. No request waits for the collector.
"""

from __future__ import annotations

import logging
import threading
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrouter.telemetry.tracing.trace import Trace

MAX_SPANS: Final = 20_480
"""Spans that wait to be sent, or are being sent, at most; about 2 KiB each."""
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
    """Hands traces to the SDK, whose thread sends them. `close` ends it.

    Args:
        resource: what the router is.
        exporter: sends spans.
        where: the collector, as the log names it.
    """

    def __init__(self, resource: Resource, exporter: SpanExporter, where: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("kvrouter", version("kvrouter"))
        self._counted = _Counted(exporter, where)
        self._processor = BatchSpanProcessor(self._counted, max_queue_size=MAX_SPANS)
        self._taken = 0  # counted by the loop; what becomes of them by the thread
        self._overflowed = 0
        self._closed = False

    def take(self, trace: Trace) -> None:
        """Have `trace` sent; dropped where too many spans wait."""
        count = len(trace.spans)
        if self._closed or self._taken + count - self._counted.ended > MAX_SPANS:
            self._overflowed += count
            return
        self._taken += count
        for span in spans_of(trace, self._resource, self._scope):
            self._processor.on_end(span)

    def counts(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Spans by outcome, for a metric."""
        yield ("exported",), float(self._counted.exported)
        yield ("dropped",), float(self._overflowed + self._counted.refused)

    def close(self, timeout_s: float) -> None:
        """Send what waits, within `timeout_s`; blocks as long. Idempotent."""
        self._closed = True
        ending = threading.Thread(target=self._processor.shutdown, name="traces end", daemon=True)
        ending.start()
        ending.join(timeout_s)


class _Counted(SpanExporter):
    """Counts what an exporter sends, and tells of a collector once; for the SDK's thread."""

    def __init__(self, exporter: SpanExporter, where: str) -> None:
        self._exporter = exporter
        self._where = where
        self._takes = True
        self.exported = 0
        self.refused = 0

    @property
    def ended(self) -> int:
        """Spans that do not wait any more."""
        return self.exported + self.refused

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # whatever the library or a proxy does
            log.debug("traces: they could not be sent", exc_info=True)
            result = SpanExportResult.FAILURE
        takes = result is SpanExportResult.SUCCESS
        if takes:
            self.exported += len(spans)
        else:
            self.refused += len(spans)
        if takes != self._takes:
            self._takes = takes
            self._tell()
        return result

    def shutdown(self) -> None:
        """Send nothing any more."""
        self._exporter.shutdown()

    def _tell(self) -> None:
        if self._takes:
            log.info("traces: %s takes spans again", self._where)
        else:
            log.warning(
                "traces: %s takes no spans; they are dropped and counted "
                "(kvrouter:trace_spans_total)",
                self._where,
            )


def otlp_exporter(endpoint: str, instance: str) -> Exporter:
    """Sends to the collector at `endpoint`, http://HOST:4318/v1/traces, what `instance` traces."""
    release = version("kvrouter")
    sends = OTLPSpanExporter(endpoint=endpoint, headers={"user-agent": f"kvrouter/{release}"})
    # What it read of the environment it has told of; of a collector that is away `_Counted` tells.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return Exporter(resource_of(instance, release), sends, endpoint)


def resource_of(instance: str, release: str) -> Resource:
    """What the router `instance` is, with what the environment says of it."""
    named = Resource.create({SERVICE_VERSION: release})
    if str(named.attributes.get(SERVICE_NAME, _UNNAMED)).startswith(_UNNAMED):
        named = named.merge(Resource({SERVICE_NAME: "kvrouter"}))
    return named.merge(Resource({"service.instance.id": instance}))


def spans_of(
    trace: Trace, resource: Resource, scope: InstrumentationScope
) -> Iterator[ReadableSpan]:
    """A trace as the SDK's spans."""
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
    """Of a text that UTF-8 can say: another would cost its whole batch."""
    return Status(StatusCode.ERROR, error.encode("utf-8", "replace").decode())
