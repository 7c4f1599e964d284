"""Endpoints of engines that take no part in prefill and decode: one decode engine answers them.

The request goes on without the members that are the router's own, its answer without transfer
parameters. Engines that are known not to have an endpoint are not asked; one that tells no
endpoints says itself what it does not have (404, 501).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter import _native
from kvrouter.access.callers import caller_of
from kvrouter.engines.compatibility import on_other_servers
from kvrouter.engines.engine import Role
from kvrouter.engines.families.splice import splice
from kvrouter.engines.families.table import WHERE_SET
from kvrouter.errors import ApiError, bad_request
from kvrouter.http.client.pool import UpstreamError
from kvrouter.http.headers import JSON
from kvrouter.http.request_id import RequestIds
from kvrouter.openai.endpoints import ENDPOINTS
from kvrouter.openai.request import BYTES_PER_TOKEN, Request
from kvrouter.openai.response import generated_tokens, tidy_answer, tidy_events
from kvrouter.routing.policies.base import in_turn
from kvrouter.serving.cut_off import CUT_OFF, cut_off
from kvrouter.serving.legs.leg import (
    MAX_ATTEMPTS,
    NOT_TAKEN,
    EngineFull,
    LegFailed,
    check_begun,
    decode_error,
)
from kvrouter.serving.request.forwarded_headers import leg_fields
from kvrouter.serving.request.request_metrics import ms
from kvrouter.serving.streaming.relay import Relay
from kvrouter.serving.streaming.sinks import SSE_FIELDS
from kvrouter.telemetry.request_log import RequestLine

if TYPE_CHECKING:
    from kvrouter.admission.recompute_budget import RecomputeBudget
    from kvrouter.admission.waiting import EngineWait, QueueWait
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.engines.models import ModelNames
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.http.server.listener import Handler
    from kvrouter.openai.endpoints import Endpoint
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.telemetry.metrics import Metrics
    from kvrouter.telemetry.request_log import RequestLog
    from kvrouter.telemetry.tracing.trace import Span, Trace, Tracing

_TOKENS: Final = attrgetter("tokens")
_MAX_ERROR_CHARS: Final = 500
NOT_SERVED: Final = ("background", "previous_response_id")
"""Members of responses that need the engine which keeps them: another one may get the next."""


@dataclass(slots=True)
class PassthroughContext:
    """What is known of one request."""

    exchange: Exchange
    endpoint: Endpoint
    request_id: str
    fields: bytes
    started_s: float
    model: str | None = None
    engine: str | None = None
    attempts: int = 0
    generated: int = 0
    outcome: str | None = None
    error: str | None = None
    tells_route: bool = False
    trace: Trace | None = None

    def leg(self, engine: Engine) -> tuple[Span | None, bytes]:
        """Its span, where the request is traced, and the header lines that the engine gets."""
        if self.trace is None:
            return None, self.fields
        span = self.trace.leg(
            "kvrouter.forward", host=engine.host, port=engine.port, engine=engine.address
        )
        return span, self.fields + self.trace.lines(span)

    @property
    def answer_fields(self) -> bytes:
        """Header lines of the answer: the request's id and, by option, which engine did it."""
        lines = f"x-request-id: {self.request_id}\r\n"
        if self.tells_route and self.engine is not None:
            lines += f"x-kvrouter-decode: {self.engine}\r\n"
        return lines.encode("latin-1")

    def line(self, status: int, now_s: float) -> RequestLine:
        """What the request's line in the log says, at its end."""
        caller = caller_of(self.exchange)
        return RequestLine(
            request_id=self.request_id,
            key=caller.name if caller is not None else None,
            trace_id=self.trace.hex_id if self.trace is not None else None,
            status=status,
            outcome=self.outcome,
            path=self.endpoint.path,
            client=self.exchange.peer,
            model=self.model,
            decode=self.engine,
            attempts=self.attempts,
            total_ms=ms(now_s - self.started_s),
            error=self.error,
        )


class Passthrough:
    """Serves `ENDPOINTS`, each request in its handler's task, by the least loaded decode engine.

    Args:
        pool: the engines.
        families: say which parameters engines take.
        legs: asks them.
        models: which models there are.
        queue_wait: bounds the requests under way.
        engine_wait: where requests wait for an engine.
        budget: bounds what decode engines compute where there are prefill engines.
        metrics: counts.
        log: takes a line per request, or None.
        tells_route: whether answers say which engine did it.
        tracing: decides which requests are traced; None: none is.
    """

    def __init__(
        self,
        *,
        pool: EnginePool,
        families: Families,
        legs: Legs,
        models: ModelNames,
        queue_wait: QueueWait,
        engine_wait: EngineWait,
        budget: RecomputeBudget,
        metrics: Metrics,
        log: RequestLog | None,
        tells_route: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self._pool = pool
        self._families = families
        self._legs = legs
        self._models = models
        self._queue_wait = queue_wait
        self._engine_wait = engine_wait
        self._budget = budget
        self._metrics = metrics
        self._log = log
        self._tells_route = tells_route
        self._tracing = tracing
        self._ids = RequestIds()
        self._turn = 0

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each endpoint."""
        return [("POST", one.path, partial(self.serve, one)) for one in ENDPOINTS]

    async def serve(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """EngineResponse one request. Never raises but when it is cancelled."""
        visit = self._begin(endpoint, exchange)
        tenant = self._queue_wait.tenant(exchange)
        entered = self._queue_wait.enter(tenant)
        try:
            if not entered:
                await self._queue_wait.turn(tenant, 0)
                entered = True
            self._metrics.running += 1
            await self._route(visit)
        except ApiError as error:
            visit.error = visit.error or error.message
            exchange.respond(
                error.status, error.body(), headers=error.headers(), fields=visit.answer_fields
            )
        except asyncio.CancelledError:
            if not (exchange.closed or exchange.ended):
                visit.outcome, visit.error = "cut_off", visit.error or CUT_OFF.message
                cut_off(exchange, self._metrics, visit.answer_fields)
            raise
        finally:
            if entered:
                self._metrics.running -= 1
                self._queue_wait.leave(tenant)
            self._settle(visit)

    def _begin(self, endpoint: Endpoint, exchange: Exchange) -> PassthroughContext:
        """What is known of a request when it comes."""
        headers, trace, context = exchange.headers, None, None
        request_id = self._ids.of(headers)
        if self._tracing is not None:
            trace, context = self._tracing.begin(headers)
        fields = leg_fields(request_id, headers, context)
        visit = PassthroughContext(exchange, endpoint, request_id, fields, monotonic())
        visit.tells_route, visit.trace = self._tells_route, trace
        return visit

    async def _route(self, visit: PassthroughContext) -> None:
        request = _read(visit.exchange.body, visit.endpoint)
        if not self._models.any:
            await self._engine_wait.until(lambda: self._models.any)
        path = visit.endpoint.path
        model = visit.model = self._models.resolve(request.model, path)
        caller = caller_of(visit.exchange)
        if caller is not None:
            caller.admit(model, request.prompt_tokens)
            caller.tokens += request.prompt_tokens
        self._models.require(model, path)
        await self._engine_wait.until(lambda: self._pool.serving(path, model))
        grant = None
        if visit.endpoint.generates and self._pool.has_role(Role.PREFILL):
            grant = self._budget.take(request.prompt_tokens)
            if grant is None:
                message = "The decode engines have no room to compute this prompt."
                raise ApiError(429, message, retry_after_s=self._budget.retry_after_s)
        try:
            await self._on_some(visit, request, model)
        finally:
            if grant is not None:
                grant.release()

    async def _on_some(self, visit: PassthroughContext, request: Request, model: str) -> None:
        """Ask one engine after the other, while the client has seen nothing and it is safe."""
        tried: list[Engine] = []
        error = ApiError(503, "No decode engine is available.", retry_after_s=1)
        while len(tried) < MAX_ATTEMPTS:
            path = visit.endpoint.path
            engines = [e for e in self._pool.serving(path, model) if e not in tried]
            if not engines:
                break
            self._turn += 1
            if tried:
                engines = list(on_other_servers(engines, tried))
            engine = min(in_turn(engines, self._turn), key=_TOKENS)
            tried.append(engine)
            try:
                await self._on(visit, engine, request)
                return
            except LegFailed as failed:
                visit.error, error = str(failed), _told(failed)
                idle = failed.failure in NOT_TAKEN or isinstance(failed, EngineFull)
                if not (visit.endpoint.again or idle):
                    break
        raise error

    async def _on(self, visit: PassthroughContext, engine: Engine, request: Request) -> None:
        visit.engine = engine.address
        visit.attempts += 1
        table = self._families.of(engine).parameters
        refused = table.refused(request)
        if refused is not None:
            raise bad_request(f"`{refused}` is not served as it is given here.", refused)
        body = request.body
        own = table.own & request.spans.keys()
        if own:
            body = splice(body, request.spans, dict.fromkeys(own))
        ticket = self._pool.reserve(engine, request.prompt_tokens)
        answer: EngineResponse | None = None
        span, fields = visit.leg(engine)
        try:
            answer = await self._legs.forward(engine, visit.endpoint.path, fields, body)
            await self._pass_on(visit, engine, answer)
        finally:
            ticket.release()
            if answer is not None:
                answer.close()
            if span is not None:
                span.end()
        self._pool.succeeded(engine)

    async def _pass_on(
        self, visit: PassthroughContext, engine: Engine, answer: EngineResponse
    ) -> None:
        content_type = answer.header(b"content-type") or JSON
        if answer.status == 200 and content_type.startswith("text/event-stream"):
            await self._stream(visit, engine, answer)
            return
        body = await self._legs.read(engine, answer)
        if answer.status >= 400 and not _is_error(body):
            message = f"The engine answers {answer.status} to {visit.endpoint.path}."
            raise ApiError(answer.status, message)
        if visit.endpoint.generates:
            visit.generated = generated_tokens(body, 0, whole=True)
        body = tidy_answer(body, None)
        fields = visit.answer_fields
        visit.exchange.respond(answer.status, body, content_type=content_type, fields=fields)

    async def _stream(
        self, visit: PassthroughContext, engine: Engine, answer: EngineResponse
    ) -> None:
        try:
            await answer.first_piece(self._legs.deadlines.first_byte_s)
            check_begun(answer)
        except UpstreamError as error:
            raise self._legs.failed(engine, Role.DECODE, error.failure, str(error)) from None
        exchange = visit.exchange
        exchange.start(200, fields=SSE_FIELDS + visit.answer_fields, hold=True)
        tidy = partial(tidy_events, cached_tokens=None)
        relay = Relay(exchange, answer, self._metrics.gaps.buckets, tidy)
        try:
            await relay.run(self._legs.deadlines.idle_s)
        except UpstreamError as error:
            failed = self._legs.failed(engine, Role.DECODE, error.failure, str(error))
            visit.error = str(failed)
            relay.fail(ApiError(502, "The engine's answer broke off."))
        finally:
            visit.generated = relay.generated

    def _settle(self, visit: PassthroughContext) -> None:
        """Count, and write the request's line."""
        exchange = visit.exchange
        caller = caller_of(exchange)
        if caller is not None:
            caller.tokens += visit.generated
            caller.charge(visit.generated)
        status = 499 if exchange.closed else exchange.status
        self._metrics.passed_through[visit.endpoint.path, str(status)] += 1
        if self._log is not None:
            self._log.write(visit.line(status, monotonic()))
        if visit.trace is not None and self._tracing is not None:
            end_visit(visit, visit.trace.request, status)
            self._tracing.take(visit.trace)


def _read(body: bytes, endpoint: Endpoint) -> Request:
    """What the way of a request depends on: its members and model.

    Raises:
        ApiError: 400.
    """
    try:
        spans, _ = _native.scan_object(body)
    except ValueError as error:
        raise bad_request(f"The body is not a JSON object that can be served: {error}.") from None
    given = {name: body[slice(*spans[name])] for name in ("model", *NOT_SERVED) if name in spans}
    model = given.pop("model", b"null")
    if model != b"null" and not model.startswith(b'"'):
        raise bad_request("`model` must be a string.", "model")
    for name, raw in given.items():
        if endpoint.generates and WHERE_SET.holds(raw):
            message = f"`{name}` is not served: engines keep responses each for themselves."
            raise bad_request(message, name)
    tokens = max(1, len(body) // BYTES_PER_TOKEN)
    return Request("chat", body, spans, orjson.loads(model), False, None, None, tokens)


def _is_error(body: bytes) -> bool:
    try:
        answer = orjson.loads(body)
    except ValueError:
        return False
    return isinstance(answer, dict) and isinstance(answer.get("error"), dict)


def _told(failed: LegFailed) -> ApiError:
    if isinstance(failed, EngineFull):
        return ApiError(429, "The engines are full.", retry_after_s=1)
    return decode_error(failed)


def end_visit(visit: PassthroughContext, span: Span, status: int) -> None:
    """Fill the span of a request that one engine answered."""
    found: dict[str, str | int | None] = {
        "http.request.method": visit.exchange.method,
        "url.path": visit.endpoint.path,
        "http.response.status_code": status,
        "gen_ai.request.id": visit.request_id,
        "gen_ai.request.model": visit.model,
        "kvrouter.decode_engine": visit.engine,
        "kvrouter.attempts": visit.attempts,
    }
    span.attributes = {name: value for name, value in found.items() if value is not None}
    span.ended_s = monotonic()
    if status >= 500:
        span.error = (visit.error or str(status))[:_MAX_ERROR_CHARS]
