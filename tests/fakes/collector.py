"""A collector of traces: takes OTLP over HTTP and decodes it, or does what a test says."""

import asyncio
import gzip
import ssl
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer

PATIENCE_S = 30.0
DECODERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
}


@dataclass(frozen=True)
class Seen:
    """One span as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    attributes: dict[str, Any]
    begun_ns: int
    ended_ns: int
    error: str
    state: str
    resource: dict[str, Any]


class Collector:
    """Takes spans on a free port.

    Attributes:
        mode: "ok"; "hang" (never answers); "busy" (503, then "ok"); else a status it answers.
        asks: how many requests came.
        spans: those that came.
        headers: of the last request.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.mode = "ok"
        self.asks = 0
        self._tls = tls
        self.spans: list[Seen] = []
        self.headers: dict[str, str] = {}
        self.asked = asyncio.Event()
        self._came = asyncio.Event()
        self._server: HttpServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = HttpServer(self._take)
        self.port = await self._server.listen("127.0.0.1", self.port, self._tls)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()

    async def trace_of(self, name: str = "kvrouter.request", traces: int = 1) -> list[Seen]:
        """The spans of the last trace, when so many spans of that name have come."""
        async with asyncio.timeout(PATIENCE_S):
            while sum(span.name == name for span in self.spans) < traces:
                self._came.clear()
                await self._came.wait()
        last = [span for span in self.spans if span.name == name][-1]
        return [span for span in self.spans if span.trace_id == last.trace_id]

    async def _take(self, exchange: Exchange) -> None:
        self.asked.set()
        self.asks += 1
        self.headers = {"path": exchange.path, **exchange.headers}
        if self.mode == "hang":
            await asyncio.Event().wait()
        if self.mode == "busy":
            self.mode = "ok"
            exchange.respond(503, headers=[("retry-after", "0")])
            return
        if self.mode != "ok":
            exchange.respond(int(self.mode))
            return
        decode = DECODERS[exchange.headers.get("content-encoding", "")]
        told = ExportTraceServiceRequest.FromString(decode(exchange.body))
        for of_resource in told.resource_spans:
            resource = {a.key: plain(a.value) for a in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.spans += [seen(span, resource) for span in scope.spans]
        exchange.respond(200, content_type="application/x-protobuf")
        self._came.set()


def seen(span: WireSpan, resource: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        {a.key: plain(a.value) for a in span.attributes},
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.message if span.status.code == 2 else "",
        span.trace_state,
        resource,
    )


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(one) for one in value.array_value.values]
    return getattr(value, kind)


@asynccontextmanager
async def collector(tls: ssl.SSLContext | None = None) -> AsyncIterator[Collector]:
    """A collector that runs."""
    made = Collector(tls)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
