"""Chooses the requests to trace, and records their spans. `otlp` sends them, if settings say so.

A request without a trace costs only the decision and a header line.
"""

from __future__ import annotations

import re
import sys
from asyncio import CancelledError
from dataclasses import dataclass, field
from random import Random
from time import monotonic, time
from typing import TYPE_CHECKING, Final, Literal

from kvrouter.telemetry.series import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.telemetry.metrics import Metrics
    from kvrouter.telemetry.settings import ObservabilitySettings
    from kvrouter.telemetry.tracing.otlp import Exporter

Value = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, Value]
Client = Literal["follow", "join", "ignore"]
Kind = Literal["server", "client", "internal"]

MAX_ERROR_CHARS: Final = 500
SWITCH_S: Final = 0.0005
"""Longest time that the SDK's thread keeps the interpreter; a tenth of Python's default."""
_SPAN_BITS: Final = 64
_TRACE_BITS: Final = 128


MAX_STATE_CHARS: Final = 512
MAX_STATE_MEMBERS: Final = 32
_PARENT: Final = re.compile(
    r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.{0,200})?"
)
_NO_VERSION: Final = "ff"
_KEY: Final = r"[a-z0-9][a-z0-9_\-*/@]{0,255}"
_VALUE: Final = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER: Final = re.compile(f"{_KEY}={_VALUE}")


@dataclass(frozen=True, slots=True)
class Parent:
    """The client's span: whether it is recorded, and its `tracestate` ("" without a valid one)."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""


def read_parent(headers: Mapping[str, str]) -> Parent | None:
    """The parent by https://www.w3.org/TR/trace-context/; None without a valid one."""
    given = headers.get("traceparent")
    if given is None:
        return None
    found = _PARENT.fullmatch(given)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == _NO_VERSION or not trace_id or not span_id or (more and version == "00"):
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & 1), _state(headers.get("tracestate")))


def context_lines(trace_id: int, span_id: int, state: str, *, sampled: bool) -> bytes:
    """Header lines that make `span_id` the parent of an engine's spans, or switch them off."""
    line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (trace_id, span_id, sampled)
    return line + b"tracestate: %b\r\n" % state.encode("ascii") if state else line


def _state(given: str | None) -> str:
    """A valid `tracestate` within the least length that all must support; else ""."""
    if not given or len(given) > MAX_STATE_CHARS:
        return ""
    members = [member.strip(" \t") for member in given.split(",")]
    members = [member for member in members if member]
    keys = {member.partition("=")[0] for member in members}
    if len(members) > MAX_STATE_MEMBERS or len(keys) < len(members):
        return ""
    return ",".join(members) if all(map(_MEMBER.fullmatch, members)) else ""


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


@dataclass(eq=False, slots=True)
class Trace:
    """The spans of one request; the first span is the request itself."""

    parent: Parent | None  # the client's span
    trace_id: int
    random: Random  # makes ids
    began_s: float = field(default_factory=time, init=False)  # Unix time of `spans[0].begun_s`
    spans: list[Span] = field(init=False)  # the request, then its parts as they began

    def __post_init__(self) -> None:
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
        span.attributes = {"server.address": host, "server.port": port, "kvrouter.engine": engine}
        self.spans.append(span)
        return span

    def lines(self, span: Span) -> bytes:
        """Header lines that make `span` the parent of an engine's spans."""
        state = self.parent.state if self.parent is not None else ""
        return context_lines(self.trace_id, span.span_id, state, sampled=True)

    def _id(self) -> int:
        return self.random.getrandbits(_SPAN_BITS) or 1


@dataclass(eq=False)
class Tracing:
    """Decides which requests are traced, and takes their traces.

    A client's `traceparent` decides: follow: continue its trace, and record it if the client does;
    join: continue its trace, and record it by `ratio`; ignore: nothing.
    """

    ratio: float  # share of the requests without a parent that are traced, 0 to 1
    client: Client
    take: Callable[[Trace], None]  # called with each trace at its end; must not wait
    random: Random = field(default_factory=Random)  # makes ids and draws

    def __post_init__(self) -> None:
        self._draw = self.random.random
        self._untraced = None, context_lines(self._trace_id(), 1, "", sampled=False)

    def begin(self, headers: Mapping[str, str]) -> tuple[Trace | None, bytes]:
        """The trace of a new request, or None, and header lines for its legs.

        The lines switch off the tracing of engines. They are empty with a trace, whose legs have
        lines of their own. All requests without a trace share one id, which is never recorded.
        """
        sampled = self._draw() < self.ratio
        if not sampled and "traceparent" not in headers:
            return self._untraced
        parent = read_parent(headers)
        if parent is None or self.client == "ignore":
            if not sampled:
                return self._untraced
            return Trace(None, self._trace_id(), self.random), b""
        if parent.sampled if self.client == "follow" else sampled:
            return Trace(parent, parent.trace_id, self.random), b""
        state = parent.state
        return None, context_lines(parent.trace_id, parent.span_id, state, sampled=False)

    def _trace_id(self) -> int:
        return self.random.getrandbits(_TRACE_BITS) or 1


def start_traces(
    settings: ObservabilitySettings, service: str, metrics: Metrics
) -> tuple[Tracing, Exporter] | tuple[None, None]:
    """The sampler and the exporter, which its owner must close; None without tracing.

    `service` is the instance id of this router, HOST:PORT.
    """
    endpoint = settings.otlp_traces_endpoint
    if endpoint is None:
        return None, None
    from kvrouter.telemetry.tracing.otlp import otlp_exporter  # noqa: PLC0415 - an extra, not a dependency

    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))  # a batch takes milliseconds
    exporter = otlp_exporter(endpoint, service)
    reading = Reading(
        "kvrouter:trace_spans",
        "Spans of traces: exported, or dropped because the collector refused them or was slow.",
        exporter.counts,
        ["outcome"],
        grows=True,
    )
    metrics.add(reading)
    ratio, client = settings.otlp_traces_sampling_ratio, settings.otlp_traces_client
    return Tracing(ratio, client, exporter.take), exporter
