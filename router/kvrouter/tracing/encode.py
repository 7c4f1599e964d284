"""Traces as OTLP's messages. What spans have in common is made once, and kept as bytes.

The bytes of two messages of one kind, joined, are the bytes of both merged: protobuf promises it.
So a span is what others have too, joined, and merged into what is its own. To make a message of
each attribute, as the SDK does, takes eight times as long.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags
from opentelemetry.proto.trace.v1.trace_pb2 import Status as WireStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.tracing.trace import Kind, Span, Trace

MAX_KEPT: Final = 4096
"""Attributes that are kept as bytes at most, the last used; of 500 characters at most."""
_MAX_KINDS: Final = 256
_NS: Final = 1_000_000_000
_KINDS: Final = {
    "server": WireSpan.SPAN_KIND_SERVER,
    "client": WireSpan.SPAN_KIND_CLIENT,
    "internal": WireSpan.SPAN_KIND_INTERNAL,
}
_FIELDS: Final = (
    (bool, "bool_value"),  # before int, which it is too
    (int, "int_value"),
    (float, "double_value"),
)
_OWN: Final = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE: Final = SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class Encoder:
    """Encodes traces of one router; for one thread.

    Args:
        resource: what the router is, by OpenTelemetry's names.
        version: of kvrouter.
    """

    def __init__(self, resource: Mapping[str, object], version: str) -> None:
        attributes = [_pair(name, value) for name, value in resource.items()]
        scope = {"scope": {"name": "kvrouter", "version": version}}
        frame: Any = {"resource": {"attributes": attributes}, "scope_spans": [scope]}
        self._frame = ExportTraceServiceRequest(resource_spans=[frame]).SerializeToString()
        self._attribute = lru_cache(MAX_KEPT, typed=True)(_attribute)
        self._kind = lru_cache(_MAX_KINDS)(_kind)

    def encode(self, traces: list[Trace]) -> bytes:
        """A request to a collector that has all of them.

        An integer of more than 64 bits is left out: OTLP has no place for it.
        """
        request = ExportTraceServiceRequest.FromString(self._frame)
        add = request.resource_spans[0].scope_spans[0].spans.add
        for trace in traces:
            state = trace.parent.state if trace.parent is not None else ""
            shared = WireSpan(trace_id=trace.trace_id.to_bytes(16), trace_state=state)
            common = shared.SerializeToString()
            moved_s = trace.began_s - trace.request.begun_s
            for span in trace.spans:
                remote = span is trace.request and span.parent_id != 0
                kept = [common, self._kind(span.name, span.kind, span.error, remote)]
                add(**self._own(span, moved_s, kept)).MergeFromString(b"".join(kept))
        encoded: bytes = request.SerializeToString()
        return encoded

    def _own(self, span: Span, moved_s: float, kept: list[bytes]) -> dict[str, Any]:
        """What no other span has; attributes that others may have too go to `kept`."""
        measured = []
        for name, value in span.attributes.items():
            if type(value) is float:
                measured.append({"key": name, "value": {"double_value": value}})
            else:
                kept.append(self._attribute(name, value))
        return {
            "span_id": span.span_id.to_bytes(8),
            "parent_span_id": span.parent_id.to_bytes(8) if span.parent_id else b"",
            "start_time_unix_nano": int((span.begun_s + moved_s) * _NS),
            "end_time_unix_nano": int((max(span.ended_s, span.begun_s) + moved_s) * _NS),
            "attributes": measured,
        }


def _kind(name: str, kind: Kind, error: str | None, remote: bool) -> bytes:
    """What spans of one kind have in common."""
    status: dict[str, Any] = {}
    if error:
        status = {"code": WireStatus.STATUS_CODE_ERROR, "message": _plain(error)}
    flags = _OWN | _REMOTE if remote else _OWN
    shared = WireSpan(name=name, kind=_KINDS[kind], flags=flags, status=WireStatus(**status))
    encoded: bytes = shared.SerializeToString()
    return encoded


def _attribute(name: str, value: object) -> bytes:
    """A span that has but this attribute; nothing where OTLP has no place for it."""
    fields: dict[str, Any] = {"attributes": [_pair(name, value)]}
    try:
        encoded: bytes = WireSpan(**fields).SerializeToString()
    except ValueError:
        return b""
    return encoded


def _pair(name: str, value: object) -> dict[str, Any]:
    return {"key": name, "value": _value(value)}


def _value(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        return {"string_value": _plain(value)}
    if isinstance(value, tuple | list):
        return {"array_value": {"values": [_value(one) for one in value]}}
    return {next(field for kind, field in _FIELDS if isinstance(value, kind)): value}


def _plain(text: str) -> str:
    """`text`, where UTF-8 can say it; a question mark in place of what it cannot."""
    return text.encode("utf-8", "replace").decode()
