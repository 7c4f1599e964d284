"""One request on its way through the router: what is known of it and what it holds.

Bookkeeping: it sends nothing and waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from kvrouter.prefix.store_view import LandingOutcome
from kvrouter.serving.request.route_headers import route_lines

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping

    from kvrouter.admission.recompute_budget import Grant
    from kvrouter.engines.engine import Engine, HashDomain
    from kvrouter.engines.families.base import Handoff
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.openai.request import Request
    from kvrouter.prefix.store_view import LandingResult
    from kvrouter.prefix.tokenize import PromptTokens
    from kvrouter.routing.plan import Plan
    from kvrouter.routing.reservations import LegReservations
    from kvrouter.telemetry.tracing.trace import Attributes, Span, Trace
    from kvrouter_store.client.asyncio_client import AsyncLease


@dataclass(slots=True)
class AwaitedLanding:
    """A landing that is awaited while the prefill leg is under way.

    Attributes:
        manifest: hex digest of the manifest.
        blocks: leading blocks of the prompt that are awaited.
        task: the wait; its owner cancels it.
    """

    manifest: str
    blocks: int
    task: asyncio.Task[LandingResult]

    @property
    def landed(self) -> bool:
        """Whether all that is awaited is in the store."""
        task = self.task
        if not task.done() or task.cancelled() or task.exception() is not None:
            return False
        return task.result().outcome is LandingOutcome.LANDED


class Tap(Protocol):
    """What a stream goes through on its way to the client."""

    @property
    def events(self) -> int:
        """Server-sent events so far."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """KV that a prefill engine keeps for one decode engine.

    Attributes:
        params: raw JSON of the `kv_transfer_params` that fetch it.
        until_s: when it may be gone, on the monotonic clock.
    """

    params: bytes
    until_s: float


@dataclass(slots=True)
class PromptFacts:
    """What the router knows of a prompt. `Survey` fills it; a landing may add the hashes.

    Attributes:
        tokens: its token ids, where the router asked for them; else None.
        domain: what gives its block hashes their meaning; None without an engine that tells.
        hashable: whether block hashes follow from token ids (and salt and adapter) alone.
        adapter: name and path of the LoRA adapter that its model is.
        hashes: its chain of 32-byte block hashes; None until a part of the router needs it.
        stored: leading blocks that the store held, by manifest; None where it was not asked.
    """

    tokens: PromptTokens | None = None
    domain: HashDomain | None = None
    hashable: bool = False
    adapter: tuple[str, str] | None = None
    hashes: bytes | None = None
    stored: Mapping[str, int] | None = None

    @property
    def ids(self) -> bytes | None:
        """Token ids, as JSON, that both legs get in place of a text prompt."""
        return self.tokens.json if self.tokens is not None else None


@dataclass(slots=True)
class Route:
    """Where the legs run. The orchestrator of the legs fills it.

    Attributes:
        plan: the engines of both legs; None until the prompt is planned.
        places: where the legs count as load, from the plan on.
        handoff: what the prefill engine answered.
        watch: the landing that is awaited, where the decode leg was sent ahead of it.
        prefill_engine: address of the last engine that was asked for prefill.
        decode_engine: address of the last engine that was asked for decode.
        attempts: decode engines that were asked.
        hit_engine: tokens of the prompt that the decode engine held at the plan.
        hit_store: tokens beyond these that the store held.
        landed_blocks: leading blocks that landed; None where no landing was awaited.
    """

    plan: Plan | None = None
    places: LegReservations | None = None
    handoff: Handoff | None = None
    watch: AwaitedLanding | None = None
    prefill_engine: str | None = None
    decode_engine: str | None = None
    attempts: int = 0
    hit_engine: int = 0
    hit_store: int = 0
    landed_blocks: int | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the prefill engine found cached; None where it was not asked."""
        return self.handoff.cached_tokens if self.handoff is not None else None


@dataclass(slots=True)
class Timing:
    """When the steps of a request ended, on the monotonic clock; 0: not yet. Each sets its own.

    Attributes:
        started_s: its arrival.
        waited_s: seconds that it waited for its turn, and for engines before its plan.
        tokenising_s: seconds until its tokens were known.
        planned_s: its plan.
        prefilled_s: the end of the last prefill leg, good or bad.
        landed_s: the end of the wait for its KV.
        first_s: the first byte of its answer.
    """

    started_s: float
    waited_s: float = 0.0
    tokenising_s: float = 0.0
    planned_s: float = 0.0
    prefilled_s: float = 0.0
    landed_s: float = 0.0
    first_s: float = 0.0


@dataclass(slots=True)
class HeldResources:
    """What a request holds until it is settled. Who takes one puts it here, `release` gives back.

    Attributes:
        lease: keeps its blocks in the store.
        grant: lets its decode engine compute what should have been loaded.
        pinned: what a prefill engine keeps for a decode engine that has not answered yet.
    """

    lease: AsyncLease | None = None
    grant: Grant | None = None
    pinned: Pinned | None = None

    def release(self) -> None:
        """Give back lease and grant. Idempotent."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        grant, self.grant = self.grant, None
        if grant is not None:
            grant.release()


@dataclass(slots=True)
class RequestOutcome:
    """How a request ended. The sink of its answer fills it, or the handler that ends it.

    Attributes:
        reason: a word for metrics and the log: a finish reason, or why there is none.
        error: what went wrong last, in a sentence.
        generated: tokens of the answer.
    """

    reason: str = "unknown"
    error: str | None = None
    generated: int = 0


@dataclass(slots=True)
class RequestContext:
    """One request on its way: what is known of it, and what it holds until it is settled.

    Attributes:
        exchange: the client's request, and the way to it.
        sink: where the decode leg's answer goes.
        request_id: as in the header of both legs and of the answer.
        fields: header lines that both legs carry.
        timing: when its steps ended.
        request: its body as parsed; None until it is parsed.
        shares: the contexts of its parts, where it is served in several.
        tells_route: whether the client is told where it ran.
        reports_tokens: whether the decode engine is to name the tokens of a stream's events.
        trace: what is noted of it, where it is traced.
        queued: whether it waits for its turn.
        tap: what its answer streams through.
    """

    exchange: Exchange
    sink: ResponseSink
    request_id: str
    fields: bytes
    timing: Timing
    request: Request | None = None
    prompt: PromptFacts = field(default_factory=PromptFacts)
    route: Route = field(default_factory=Route)
    held: HeldResources = field(default_factory=HeldResources)
    outcome: RequestOutcome = field(default_factory=RequestOutcome)
    shares: list[RequestContext] | None = None
    tells_route: bool = False
    reports_tokens: bool = False
    trace: Trace | None = None
    queued: bool = False
    tap: Tap | None = None

    @property
    def provided(self) -> bool:
        """Whether the decode engine needs nothing any more: it answers, or all has landed."""
        watch = self.route.watch
        return bool(self.timing.first_s) or (watch is not None and watch.landed)

    @property
    def answer_fields(self) -> bytes:
        """Header lines of the answer: the request's id and, by option, where it ran."""
        line = b"x-request-id: %b\r\n" % self.request_id.encode("latin-1")
        return line + route_lines(self) if self.tells_route else line

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

    def landed(self, since_s: float, landing: LandingResult) -> None:
        """The wait for its KV, since then, has ended."""
        now_s = self.timing.landed_s = monotonic()
        if self.trace is not None:
            outcome, blocks = str(landing.outcome), landing.blocks
            found: Attributes = {"kvrouter.outcome": outcome, "kvrouter.blocks": blocks}
            self.trace.note("kvrouter.landing", since_s, now_s, found)

    def leg(self, name: str, engine: Engine) -> tuple[Span | None, bytes]:
        """A leg begins: its span, where the request is traced, and the header lines it carries."""
        if self.trace is None:
            return None, self.fields
        span = self.trace.leg(name, host=engine.host, port=engine.port, engine=engine.address)
        return span, self.fields + self.trace.lines(span)

    def end_decode(self, span: Span) -> None:
        """A decode leg is over: its span tells when its first byte came, where one did."""
        first_s = self.timing.first_s
        if first_s:
            span.attributes["kvrouter.first_byte_ms"] = (first_s - span.begun_s) * 1000
        span.end()
        if self.outcome.reason == "broken":
            span.error = span.error or self.outcome.error

    def began(self, now_s: float) -> None:
        """The answer's first byte came: its prompt is in the engine, no KV needs holding."""
        self.timing.first_s = now_s
        if self.route.places is not None:
            self.route.places.computed()
        self.held.release()

    def sum_up(self) -> None:
        """The shares have ended: give back what they hold, put together what became of them."""
        shares = self.shares or []
        routes, outcomes = [s.route for s in shares], [s.outcome for s in shares]
        self.route = _joined_route(routes)
        self._take_times(shares)
        outcome = self.outcome
        outcome.generated = sum(each.generated for each in outcomes)
        outcome.error = outcome.error or _joined(each.error for each in outcomes)
        if outcome.reason == "unknown" and shares:
            outcome.reason = outcomes[-1].reason
        for share in shares:
            share.held.release()

    def _take_times(self, shares: list[RequestContext]) -> None:
        """The times are those of the share that was answered first."""
        began = [share.timing for share in shares if share.timing.first_s]
        if began:
            first = min(began, key=attrgetter("first_s"))
            self.timing = replace(first, started_s=self.timing.started_s)


def _joined_route(routes: list[Route]) -> Route:
    """The route of a request whose shares ran these."""
    plans = [route.plan for route in routes if route.plan is not None]
    landed = [route.landed_blocks for route in routes if route.landed_blocks is not None]
    return Route(
        plan=replace(plans[0], why=_joined(plan.why for plan in plans) or "") if plans else None,
        prefill_engine=_joined(route.prefill_engine for route in routes),
        decode_engine=_joined(route.decode_engine for route in routes),
        attempts=sum(route.attempts for route in routes),
        hit_engine=sum(route.hit_engine for route in routes),
        hit_store=sum(route.hit_store for route in routes),
        landed_blocks=sum(landed) if landed else None,
    )


def _joined(words: Iterable[str | None]) -> str | None:
    """The different ones of `words`, in their order."""
    return ",".join(dict.fromkeys(word for word in words if word)) or None


class ResponseSink(Protocol):
    """Takes the answer of one decode leg. From its first call on no other engine can answer.

    It calls `RequestContext.began` when the first byte of the answer goes on, and fills
    `RequestContext.outcome`.
    """

    async def stream(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Pass on a stream whose first piece is there, to its end; the caller closes `answer`."""

    def whole(self, context: RequestContext, body: bytes) -> None:
        """Pass on an answer that came whole."""
