"""Chooses the requests to trace, and records their spans. No I/O, no OpenTelemetry.

A request without a trace costs only the decision and a header line.
"""

from __future__ import annotations

import sys
from asyncio import CancelledError
from dataclasses import dataclass, field
from random import Random
from time import monotonic, time
from typing import TYPE_CHECKING, Final, Literal

from kvrouter.telemetry.tracing.context import Parent, context_lines, read_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


Value = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, Value]
Client = Literal["follow", "join", "ignore"]
Kind = Literal["server", "client", "internal"]

MAX_ERROR_CHARS: Final = 500
_SPAN_BITS: Final = 64
_TRACE_BITS: Final = 128


@dataclass(slots=True)
class Span:
    """One part of a request, on the monotonic clock; `ended_s` is 0 until it ends."""

    name: str
    kind: Kind
    span_id: int
    begun_s: float
    ended_s: float = 0.0
    attributes: Attributes = field(default_factory=dict)
    error: str | None = None

    def end(self) -> None:
        """End the span, with the exception that is being handled, if any."""
        self.ended_s = monotonic()
        raised = sys.exception()
        if isinstance(raised, CancelledError):
            self.attributes["kvrouter.cancelled"] = True
        elif raised is not None:
            self.error = str(raised)[:MAX_ERROR_CHARS]


class Trace:
    """The spans of one request; the first span is the request itself.

    Args:
        parent: the client's span, or None.
        trace_id: of the trace.
        random: makes ids.

    Attributes:
        spans: the request, then its parts in the order in which they began.
        began_s: Unix time of `spans[0].begun_s`.
    """

    __slots__ = ("_random", "began_s", "parent", "spans", "trace_id")

    def __init__(self, parent: Parent | None, trace_id: int, random: Random) -> None:
        self._random = random
        self.parent = parent
        self.trace_id = trace_id
        self.began_s = time()
        self.spans = [Span("kvrouter.request", "server", self._id(), monotonic())]

    @property
    def hex_id(self) -> str:
        """The trace's id, as in headers."""
        return f"{self.trace_id:032x}"

    @property
    def request(self) -> Span:
        """The span of the request."""
        return self.spans[0]

    def note(
        self, name: str, begun_s: float, ended_s: float, attributes: Mapping[str, Value]
    ) -> None:
        """Add a part within the router that has ended."""
        span = Span(name, "internal", self._id(), begun_s, ended_s)
        span.attributes.update(attributes)
        self.spans.append(span)

    def leg(self, name: str, *, host: str, port: int, engine: str) -> Span:
        """Begin the span of a leg to `engine` (its address) on `host`; its owner must `end` it."""
        span = Span(name, "client", self._id(), monotonic())
        span.attributes = {
            "server.address": host,
            "server.port": port,
            "kvrouter.engine": engine,
        }
        self.spans.append(span)
        return span

    def lines(self, span: Span) -> bytes:
        """Header lines that make `span` the parent of an engine's spans."""
        state = self.parent.state if self.parent is not None else ""
        return context_lines(self.trace_id, span.span_id, state, sampled=True)

    def _id(self) -> int:
        return self._random.getrandbits(_SPAN_BITS) or 1


class Tracing:
    """Decides which requests are traced, and takes their traces.

    Args:
        ratio: share of the requests without a parent that are traced, 0 to 1.
        client: what a client's `traceparent` decides. follow: continue its trace, and record it if
            the client does; join: continue its trace, and record it by `ratio`; ignore: nothing.
        take: called with each trace at its end; must not wait.
        random: makes ids and draws.
    """

    def __init__(
        self,
        ratio: float,
        client: Client,
        take: Callable[[Trace], None],
        random: Random | None = None,
    ) -> None:
        self._ratio = ratio
        self._client = client
        self._random = random or Random()
        self._draw = self._random.random
        self._untraced = None, context_lines(self._trace_id(), 1, "", sampled=False)
        self.take = take

    def begin(self, headers: Mapping[str, str]) -> tuple[Trace | None, bytes]:
        """The trace of a new request, or None, and header lines for its legs.

        The lines switch off the tracing of engines. They are empty with a trace, whose legs have
        lines of their own. All requests without a trace share one id, which is never recorded.
        """
        sampled = self._draw() < self._ratio
        if not sampled and "traceparent" not in headers:
            return self._untraced
        parent = read_parent(headers)
        if parent is None or self._client == "ignore":
            if not sampled:
                return self._untraced
            return Trace(None, self._trace_id(), self._random), b""
        if parent.sampled if self._client == "follow" else sampled:
            return Trace(parent, parent.trace_id, self._random), b""
        state = parent.state
        return None, context_lines(parent.trace_id, parent.span_id, state, sampled=False)

    def _trace_id(self) -> int:
        return self._random.getrandbits(_TRACE_BITS) or 1
