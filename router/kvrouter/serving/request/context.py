"""One request on its way through the router: what is known of it and what it holds.

Also its header lines: what its legs carry of the client's, and what its answer says. Bookkeeping:
it sends nothing and waits for nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import attrgetter
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.admission.held import HeldResources
from kvrouter.engines.families.base import KvSource
from kvrouter.fates.history import NEVER, Past
from kvrouter.openai.request import UNREAD, Request
from kvrouter.prefix.index import block_ids
from kvrouter.prefix.stores.base import NOTHING_HELD, LandingOutcome, LandingResult, StoreMatch
from kvrouter.serving.request.summary import parts_of
from kvrouter.telemetry.metrics import PARTS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping

    from kvrouter.admission.queue import Waiting
    from kvrouter.admission.waiting import QueueWait
    from kvrouter.engines.engine import Engine, HashDomain
    from kvrouter.engines.families.base import Handoff, PendingKv
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.openai.endpoints import Endpoint
    from kvrouter.prefix.stores.base import Origin
    from kvrouter.prefix.tokenize import PromptTokens
    from kvrouter.routing.plan import LegReservations, Plan, RouteInputs
    from kvrouter.telemetry.tracing.trace import Attributes, Span, Trace

TRACED: Final = ("traceparent", "tracestate")
FORWARDED: Final = ("authorization", *TRACED, "baggage", "x-session-id", "x-data-parallel-rank")
"""Headers of the client that both legs carry, besides the request's id."""
_RANK: Final = re.compile(rb"^x-data-parallel-rank:[^\r\n]*\r\n", re.MULTILINE)
_ID: Final = re.compile(rb"^x-request-id: [^\r\n]*", re.MULTILINE)
_CONTEXT: Final = re.compile(rb"^traceparent: [^\r\n]*", re.MULTILINE)


@dataclass(slots=True)
class AwaitedLanding:
    """A landing that is awaited while the prefill leg runs."""

    manifest: str  # its hex digest
    blocks: int  # leading blocks of the prompt that are awaited
    task: asyncio.Task[LandingResult]  # the wait; its owner cancels it
    node: str | None = None  # URL of the store node where it is awaited, if it is one of several

    @property
    def landed(self) -> bool:
        """Whether all that is awaited is in the store."""
        task = self.task
        ended = task.done() and not task.cancelled() and task.exception() is None
        return ended and task.result().outcome is LandingOutcome.LANDED


class ClientStream(Protocol):
    """What an answer streams through."""

    @property
    def events(self) -> int:
        """Server-sent events so far."""

    @property
    def last_s(self) -> float:
        """When a part of it came last, on the monotonic clock."""

    @property
    def between_events(self) -> bool:
        """Whether what has gone to the client ends between two events."""


class Attempted(Protocol):
    """What has failed of a request."""

    def proven(self) -> None:
        """Another engine does well what they failed."""


@dataclass(slots=True)
class PromptFacts:
    """What the router knows of a prompt. `InputsBuilder` fills it; a landing may add the hashes."""

    tokens: PromptTokens | None = None  # its token ids, if the router asked for them
    domain: HashDomain | None = None  # what its block hashes mean; None: no engine says
    hashable: bool = False  # whether its hashes follow from token ids, salt and adapter alone
    adapter: tuple[str, str] | None = None  # name and path of the LoRA adapter
    hashes: bytes | None = None  # its chain of 32-byte block hashes, once they are needed
    origin: Origin | None = None  # what these were made of
    learnt: bytes | None = None  # names of its pieces, where its block hashes are unknown
    prefilled: Request | None = None  # what the prefill leg sends instead of the request
    stored: Mapping[str, StoreMatch] | None = None  # what the store held of it, by manifest
    past: Past = NEVER  # what earlier requests had of it
    coming_blocks: int = 0  # leading ones that legs in flight were to compute, half or more of them

    def stored_for(self, manifest: str | None) -> StoreMatch:
        """What the store held of it for engines with that manifest."""
        return (self.stored or {}).get(manifest or "", NOTHING_HELD)

    @property
    def ids(self) -> bytes | None:
        """Token ids, as JSON, that both legs get in place of a text prompt."""
        return self.tokens.json if self.tokens is not None else None


@dataclass(slots=True)
class Route:
    """Where the legs run."""

    inputs: RouteInputs | None = None  # what the plan was made of
    plan: Plan | None = None  # the engines of both legs
    reservations: LegReservations | None = None  # the load of the legs, from the plan on
    handoff: Handoff | None = None  # what the prefill engine answered
    awaited: AwaitedLanding | None = None  # if the decode leg was sent before the landing
    prefill_engine: str | None = None  # address of the last engine that was asked for prefill
    decode_engine: str | None = None  # address of the last engine that was asked for decode
    attempts: int = 0  # decode engines that were asked
    hit_engine: int = 0  # tokens of the prompt that the decode engine held at the plan
    hit_lower: int = 0  # tokens beyond these in its host memory or storage
    hit_store: int = 0  # tokens beyond these that the store held
    landed_blocks: int | None = None  # leading blocks that landed; None: no landing was awaited
    nothing_landed: str | None = None  # why no block did after the last prefill leg
    stored: StoreMatch | None = None  # what the store holds since then, if it has several nodes

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the prefill engine found cached; None if it was not asked."""
        return self.handoff.cached_tokens if self.handoff is not None else None

    def follow(self, plan: Plan) -> None:
        """The legs run as `plan` says from now on."""
        self.plan = plan

    def reserve(self, reservations: LegReservations) -> None:
        """The load of the legs is counted there."""
        self.reservations = reservations

    def note_hits(
        self, inputs: RouteInputs, hit_engine: int, hit_lower: int, hit_store: int
    ) -> None:
        """So many tokens were there when the legs were planned, of these inputs."""
        self.inputs = inputs
        self.hit_engine, self.hit_lower, self.hit_store = hit_engine, hit_lower, hit_store

    def note_prefill(self, engine: str) -> None:
        """The engine at this address gets the prefill leg."""
        self.prefill_engine = engine

    def note_decode(self, engine: str) -> None:
        """The engine at this address gets the decode leg."""
        self.decode_engine = engine
        self.attempts += 1

    def note_handoff(self, handoff: Handoff | None) -> None:
        """A prefill engine has answered so; None: its answer is worth nothing any more."""
        self.handoff = handoff

    def note_wait(self, awaited: AwaitedLanding) -> None:
        """A landing is awaited while the prefill leg runs."""
        self.awaited = awaited

    def note_landing(self, blocks: int, stored: StoreMatch | None) -> None:
        """So many leading blocks have landed; the store holds `stored` of the prompt since then."""
        self.landed_blocks, self.stored = blocks, stored

    def note_nothing(self, cause: str) -> None:
        """No block landed, for that cause."""
        self.nothing_landed = cause

    def add(self, leg: Route) -> None:
        """The legs of a part that has gone on elsewhere count as this route's."""
        self.attempts += leg.attempts
        self.decode_engine = leg.decode_engine or self.decode_engine


@dataclass(slots=True)
class Timing:
    """When the steps of a request ended, on the monotonic clock; 0: not yet."""

    started_s: float  # its arrival
    waited_s: float = 0.0  # how long it waited for its turn, and for engines before its plan
    tokenising_s: float = 0.0  # how long it took to know its tokens
    planned_s: float = 0.0
    prefilled_s: float = 0.0  # the end of the last prefill leg, good or bad
    landed_s: float = 0.0  # the end of the wait for its KV
    first_s: float = 0.0  # the first byte of its answer, of a stream's first event with content

    def planned(self) -> None:
        """Its legs are planned now."""
        self.planned_s = monotonic()

    def prefilled(self) -> float:
        """A prefill leg has ended now; returns the time."""
        self.prefilled_s = monotonic()
        return self.prefilled_s


@dataclass(slots=True)
class RequestOutcome:
    """How a request ended."""

    status: int = 0  # of an error that came too late for the head of the answer
    reason: str = "unknown"  # for metrics and the log: a finish reason, or why there is none
    error: str | None = None  # what went wrong last, in a sentence
    generated: int = 0  # tokens of the answer
    prompt_tokens: int | None = None  # as the engine that answered counted; None: it did not say
    cached_tokens: int | None = None  # of these, not computed by it; None: it did not say

    def fail(self, error: str) -> None:
        """Something went wrong; it may end well all the same."""
        self.error = error

    def end(self, reason: str, error: str | None = None, status: int = 0) -> None:
        """It ends so. An error that was told before says more than `error`."""
        self.reason, self.status = reason, status or self.status
        self.error = self.error or error

    def break_off(self, error: str) -> None:
        """The answer broke off."""
        self.reason, self.error = "broken", error

    def count(self, generated: int) -> None:
        """The client got so many tokens."""
        self.generated = generated

    def count_prompt(self, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """The engine that answered counted the prompt so."""
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens


@dataclass(slots=True, eq=False)
class RequestContext:
    """One request on its way: what is known of it, and what it holds until it is settled."""

    exchange: Exchange  # the client's request, and the way to answer it
    request_id: str  # as in the header of both legs and of the answer
    fields: bytes  # header lines that both legs carry
    timing: Timing
    turns: tuple[tuple[QueueWait, Waiting], ...] = ()  # where it waited for its turn
    request: Request = UNREAD
    model: str = ""  # its name, once it is known to be served, or that it probably means
    resolved: bool = False  # whether it is known to be served
    gates: tuple[QueueWait, ...] = ()  # of models with a limit, in which it has a place
    alias: str | None = None  # by which the client asked for the model, if it is no model's name
    endpoint: Endpoint | None = None  # the endpoint of a passed-through request; None: it has legs
    prompt: PromptFacts = field(default_factory=PromptFacts)
    route: Route = field(default_factory=Route)
    resources: HeldResources = field(default_factory=HeldResources)
    outcome: RequestOutcome = field(default_factory=RequestOutcome)
    shares: list[RequestContext] | None = None  # the contexts of its parts, if it has several
    route_headers: bool = False  # whether the answer says where it ran
    reports_tokens: bool = False  # whether the decode engine is to name the tokens of its events
    trace: Trace | None = None  # what is noted of it, if it is traced
    queued: bool = False  # whether it waits for its turn
    stream: ClientStream | None = None  # what its answer streams through
    commented_s: float = 0.0  # when the client got comments last that are no part of it
    attempts: Attempted | None = None  # how engines failed it, once one has

    @property
    def status(self) -> int:
        """Of its answer, or of the error event that stands for one."""
        return self.outcome.status or self.exchange.status

    @property
    def answering(self) -> bool:
        """Whether the client has some of its answer; comments are none."""
        return bool(self.timing.first_s) or self.stream is not None

    @property
    def kv_ready(self) -> bool:
        """Whether the decode engine needs no more KV: it answers, or all has landed."""
        awaited = self.route.awaited
        return bool(self.timing.first_s) or (awaited is not None and awaited.landed)

    @property
    def why(self) -> str | None:
        """The reason of its plan, or the different ones of its shares' plans; None: no plan."""
        plans = [each.route.plan for each in self.shares or [self]]
        return ",".join(dict.fromkeys(plan.why for plan in plans if plan is not None)) or None

    def source(self, engine: Engine, pending: PendingKv | None = None) -> KvSource | None:
        """Where most of the KV is that the own node of `engine` lacks; None: no other node has it.

        `pending`: what is on its way to a node, and for what the engine is to wait.
        """
        found = self.route.stored or self.prompt.stored_for(engine.manifest)
        node = found.source(engine.node) if pending is None else pending.node
        if node is None:
            return None
        first, stop = (0, pending.blocks) if pending else (found.at(engine.node), found.at(node))
        ids = block_ids(self.prompt.hashes or b"")[first:stop]
        return KvSource(node, self.request_id, ids.tolist())

    def waited(self, since_s: float, reason: str) -> None:
        """It has waited since then, for its turn or for an engine."""
        now_s = monotonic()
        self.timing.waited_s += now_s - since_s
        if self.trace is not None:
            self.trace.note("kvrouter.queue", since_s, now_s, {"kvrouter.reason": reason})

    def tokenised(self, since_s: float) -> None:
        """Its tokens were asked for then and are known now, or cannot be."""
        now_s = monotonic()
        self.timing.tokenising_s = now_s - since_s
        if self.trace is not None:
            tokens = len(self.prompt.tokens) if self.prompt.tokens is not None else 0
            self.trace.note("kvrouter.tokenise", since_s, now_s, {"kvrouter.tokens": tokens})

    def note_landing(self, since_s: float, landing: LandingResult) -> None:
        """The wait for its KV, since then, has ended."""
        now_s = self.timing.landed_s = monotonic()
        if self.trace is not None:
            outcome, blocks = str(landing.outcome), landing.blocks
            found: Attributes = {"kvrouter.outcome": outcome, "kvrouter.blocks": blocks}
            self.trace.note("kvrouter.landing", since_s, now_s, found)

    def begin_leg(self, name: str, engine: Engine) -> tuple[Span | None, bytes]:
        """A leg begins: its span, if the request is traced, and the header lines it carries."""
        if self.trace is None:
            return None, self.fields
        span = self.trace.leg(name, host=engine.host, port=engine.port, engine=engine.address)
        return span, self.fields + self.trace.lines(span)

    def answer_began(self) -> None:
        """The answer's first byte came: its prompt is in the engine, no KV needs holding."""
        self.timing.first_s = monotonic()
        if self.route.reservations is not None:
            self.route.reservations.computed()
        self.answered_well()

    def answered_well(self) -> None:
        """An engine does it: release what was held for it, and count those that failed it."""
        self.resources.release()
        if self.attempts is not None:
            self.attempts.proven()


class ResponseSink(Protocol):
    """Takes the answer of one decode leg. Once it has passed a byte on, no other engine can answer.

    It calls `RequestContext.answer_began` when the first byte of the answer goes on, and fills
    `RequestContext.outcome`.
    """

    def comments(self, context: RequestContext, events: bytes) -> None:
        """Pass on what comes of a stream before its first event with data."""

    async def stream(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Pass on a stream whose first event is there, to its end; the caller closes `answer`."""

    async def whole(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Pass on an answer that is no stream; raises as `EngineClient.read`."""


def leg_fields(request_id: str, headers: Mapping[str, str], context: bytes | None = None) -> bytes:
    """Header lines for both legs of a request. The parser has refused line breaks in values.

    Lines of a trace `context` replace the client's.
    """
    lines = f"content-type: application/json\r\nx-request-id: {request_id}\r\n"
    for name in FORWARDED:
        if name in headers and (context is None or name not in TRACED):
            lines += f"{name}: {headers[name]}\r\n"
    return lines.encode("latin-1") + (context or b"")


def without_rank(fields: bytes) -> bytes:
    """Header lines of `leg_fields`, without the data-parallel rank that the client named."""
    return _RANK.sub(b"", fields)


def with_own_id(fields: bytes) -> bytes:
    """Header lines of `leg_fields`, with a request id that begins like theirs and is unique."""
    suffix = f"-{token_hex(8)}".encode()
    return _ID.sub(lambda found: found[0] + suffix, fields, count=1)


def with_id(fields: bytes, request_id: str) -> bytes:
    """Header lines of `leg_fields`, with that request id."""
    line = b"x-request-id: " + request_id.encode("latin-1")
    return _ID.sub(lambda _: line, fields, count=1)


def with_context(fields: bytes, other: bytes) -> bytes:
    """Header lines `fields`, with the trace context of `other`."""
    found = _CONTEXT.search(other)
    return fields if found is None else _CONTEXT.sub(lambda _: found[0], fields, count=1)


def answer_fields(context: RequestContext) -> bytes:
    """Header lines of the answer: the request's id and, by option, where it ran."""
    line = b"x-request-id: %b\r\n" % context.request_id.encode("latin-1")
    return line + _route_lines(context) if context.route_headers else line


def _route_lines(context: RequestContext) -> bytes:
    """Header lines: the engines of both legs, tokens that were there already, parts of the time.

    For a request that is served in several shares: all engines so far, and the times of the share
    that is answered first. An answer that began without an engine names none.
    """
    shares = context.shares or [context]
    lines = [
        *_engines("x-kvrouter-prefill", (share.route.prefill_engine for share in shares)),
        *_engines("x-kvrouter-decode", (share.route.decode_engine for share in shares)),
    ]
    if context.endpoint is None:
        hits = sum(s.route.hit_engine + s.route.hit_lower + s.route.hit_store for s in shares)
        lines.append(f"x-kvrouter-hit-tokens: {hits}\r\n")
        plan = context.route.plan
        if plan is not None and plan.predicted_s:
            lines.append(f"x-kvrouter-plan: {plan.why}; predicted={plan.predicted_s:.3f}\r\n")
    times = [share.timing for share in shares if share.timing.first_s]
    if times:
        first = min(times, key=attrgetter("first_s"))
        parts = zip(PARTS, parts_of(first, first.first_s), strict=True)
        durations = (f"{part};dur={seconds * 1000:.3f}" for part, seconds in parts)
        lines.append(f"server-timing: {', '.join(durations)}\r\n")
    return "".join(lines).encode("latin-1")


def _engines(name: str, engines: Iterable[str | None]) -> list[str]:
    named = ",".join(dict.fromkeys(engine for engine in engines if engine))
    return [f"{name}: {named}\r\n"] if named else []
