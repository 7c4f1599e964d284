"""Endpoints of engines that take no part in prefill and decode: one decode engine answers them.

A request goes on without the members that are the router's own, its answer without transfer
parameters. An engine that is known not to have an endpoint is not asked; an engine that lists no
endpoints answers itself what it does not have (404, 501).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

import orjson

from kvrouter import _native
from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.parameter_table import WHERE_SET
from kvrouter.engines.families.splice import splice
from kvrouter.errors import ApiError, bad_request, endpoint_not_served
from kvrouter.http.bounded_json import bounded
from kvrouter.http.client.pool import EngineResponse, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.http.headers import JSON
from kvrouter.openai.endpoints import LOAD, OTHER, Endpoint, endpoint_at
from kvrouter.openai.form import is_form, read_form
from kvrouter.openai.media import text_bytes
from kvrouter.openai.plain import in_plain_json
from kvrouter.openai.request import BYTES_PER_TOKEN, Request, salt_of
from kvrouter.openai.response import PromptUsage, answer_usage, tidy_answer, tidy_events
from kvrouter.routing.plan import Plan, RouteInputs, Why, chosen_by
from kvrouter.routing.policies.base import Policy, in_turn
from kvrouter.serving.legs.calls import call
from kvrouter.serving.legs.failures import (
    LegFailed,
    Refused,
    Tried,
    Words,
    answer_of,
    failure_of,
    note,
)
from kvrouter.serving.legs.leg import EngineClient, check_begun, check_plain
from kvrouter.serving.legs.verdict import words_of
from kvrouter.serving.request.context import answer_fields
from kvrouter.serving.streaming.onward import pass_on
from kvrouter.serving.streaming.relay import Relay, begin_events, broke_off, pass_comments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.admission.held import RecomputeBudget
    from kvrouter.admission.waiting import EngineWait
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool, Ticket
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.serving.legs.inputs import InputsBuilder
    from kvrouter.serving.rendered import RenderedLegs
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.serving.request.limits import ServingLimits
    from kvrouter.telemetry.metrics import Metrics
    from kvrouter.telemetry.tracing.trace import Span

    Sent = tuple[str, bytes, bytes]

    """Path, header lines and body."""

_TOKENS: Final = attrgetter("tokens")
_MESSAGE: Final = 1000  # characters of an engine's message that are passed on
NOT_SERVED: Final = ("background", "previous_response_id")
"""Members of responses that need the engine which keeps them: another one may get the next."""


async def forward(
    client: EngineClient, engine: Engine, sent: Sent, *, as_it_is: bool = False, once: bool = False
) -> EngineResponse:
    """The engine's answer to a request that is no leg, also if the engine refuses it.

    With `as_it_is` an answer of any status: it says nothing about the engine. `once`: the request
    is never sent again, as the engine may have begun with it.

    The caller must take the answer to its end or close it, and report success to the pool.

    Raises:
        LegFailed: no answer came, or one that is about the engine and not about the request.
    """
    try:
        answer = await client.send(engine, *sent, client.deadlines, once=once)
        if answer.status == 200:
            check_plain(answer)
    except UpstreamError as error:
        raise client.failed(engine, error) from None
    ours = client.worker_keys.judged(engine.server.address, answer.status)
    failure = failure_of(answer.status, is_json=True, ours=ours)
    if as_it_is or answer.status < 400 or failure is Failure.REQUEST:
        return answer
    raise await client.not_well(engine, Role.DECODE, answer)


@dataclass(eq=False, slots=True)
class FleetLoad:
    """Answers /load with the sum of what engines say there, whatever their role and model.

    vLLM's is the number of its requests, 0 without --enable-server-load-tracking
    (entrypoints/serve/instrumentator/basic.py). Engines that do not say it within seconds are left
    out; 404 if none does.
    """

    client: EngineClient
    pool: EnginePool
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _told: list[int] = field(default_factory=list, init=False)
    _told_s: float = field(default=float("-inf"), init=False)  # when that was asked for

    async def serve(self, exchange: Exchange) -> None:
        """Answer a GET. Clients that come while engines are asked share what is asked after it."""
        came_s = monotonic()
        async with self._turn:
            if self._told_s < came_s:
                asked_s = monotonic()
                self._told, self._told_s = await self._ask_all(), asked_s
        if self._told:
            exchange.respond(200, orjson.dumps({"server_load": sum(self._told)}))
        else:
            error = endpoint_not_served(LOAD, ())
            exchange.respond(error.status, error.body())

    async def _ask_all(self) -> list[int]:
        joined = [engine for engine in self.pool.all() if engine.identity is not None]
        told = await asyncio.gather(*map(self._ask, joined))
        return [load for load in told if load is not None]

    async def _ask(self, engine: Engine) -> int | None:
        if engine.identity is None or not engine.identity.serves(LOAD):
            return None
        try:
            status, body = await call(self.client, engine, LOAD, b"")
            load = orjson.loads(bounded(body))["server_load"] if status == 200 else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return load if isinstance(load, int) else None


@dataclass(eq=False, slots=True, kw_only=True)
class Passthrough:
    """The `Service` of `ENDPOINTS`: a decode engine answers, the least loaded or the session's."""

    pool: EnginePool
    families: Families  # say which parameters engines take
    client: EngineClient
    engine_wait: EngineWait  # where requests wait for an engine
    budget: RecomputeBudget  # bounds what decode engines compute, if there are prefill engines
    metrics: Metrics  # times streams
    policy: Policy  # chooses the engine that computes a prompt
    inputs_builder: InputsBuilder  # knows which engine may have it already
    rendered: RenderedLegs  # takes requests that can have both legs
    limits: ServingLimits
    _turn: int = field(default=0, init=False)

    def read(self, exchange: Exchange) -> Request:
        """See `Service`. A request without a body names its model in the query."""
        endpoint, kind = endpoint_at(exchange.path), exchange.headers.get("content-type", "")
        if endpoint.method == "GET":
            model = parse_qs(exchange.query).get("model", [None])[-1]
            return Request("chat", b"", {}, model, False, 0, None, 1)
        if endpoint is OTHER and is_form(kind):
            return read_form(exchange.body, kind)
        return _read(exchange.body, endpoint)

    async def answer(self, context: RequestContext) -> None:
        """See `Service`."""
        path, model = context.exchange.path, context.model
        endpoint = endpoint_at(path)
        if not self.pool.serving(path, model):
            since_s = monotonic()
            await self.engine_wait.until(lambda: self.pool.serving(path, model), model)
            context.waited(since_s, "engine")
        why = await self.rendered.run(context)
        if why is not None:
            try:
                await self._ask_engines(context, endpoint, why)
            except Refused as refused:
                raise _told(refused.words, path) from None

    async def _ask_engines(self, context: RequestContext, endpoint: Endpoint, why: Why) -> None:
        """Ask one engine after another, while the client has seen nothing and it is safe.

        `why`: what speaks against a prefill leg.
        """
        if not context.timing.planned_s:
            context.timing.planned()
        tried = Tried()
        while len(tried) < self.limits.max_attempts:
            engines = tried.others(self.pool.serving(context.exchange.path, context.model))
            if not engines:
                break
            self._turn += 1
            engine, computed_tokens = self._choose(context, endpoint, engines)
            tried.append((engine, engine.joins))
            if endpoint.generates:
                context.route.follow(Plan(None, engine, computed_tokens, why))
            try:
                await self._ask(context, endpoint, engine, computed_tokens)
                return
            except LegFailed as failed:
                if not note(context, failed) or (failed.row.begun and not endpoint.again):
                    break
        raise answer_of(context)

    def _choose(
        self, context: RequestContext, endpoint: Endpoint, engines: Sequence[Engine]
    ) -> tuple[Engine, int]:
        """The engine to ask, and how many tokens of the prompt it will compute."""
        request, headers = context.request, context.exchange.headers
        computed_tokens = request.prompt_tokens if endpoint.generates else 0
        of_a_session = endpoint.generates or endpoint is OTHER
        if not (of_a_session and self.inputs_builder.needs_hashes):
            self._count_choice(context, "load")
            return min(in_turn(engines, self._turn), key=_TOKENS), computed_tokens
        found = self.inputs_builder.learnt.look(request, headers, context.model)
        context.prompt.learnt, piece_tokens, guesses, session = found
        inputs = RouteInputs(
            request.prompt_tokens,
            engines,
            block_tokens=piece_tokens,
            guesses=guesses,
            learnt=True,
            session=session,
            split=False,
        )
        plan = self.policy.plan(inputs)
        self._count_choice(context, chosen_by(inputs, plan.decode))
        return plan.decode, min(plan.computed_tokens, computed_tokens)

    def _count_choice(self, context: RequestContext, by: str) -> None:
        """Once for a request: not after a failed attempt, nor after a plan of both legs."""
        if not context.route.attempts and context.route.plan is None:
            self.metrics.chosen[by] += 1

    async def _ask(
        self, context: RequestContext, endpoint: Endpoint, engine: Engine, computed_tokens: int
    ) -> None:
        request = context.request
        context.route.note_decode(engine.address)
        table = self.families.of(engine).parameters
        refused = table.refused(request)
        if refused is not None:
            raise bad_request(f"The router does not support this value of `{refused}`.", refused)
        own = dict.fromkeys(table.own & request.spans.keys())
        body = splice(request.body, request.spans, own) if own else request.body
        if endpoint.generates and self.pool.has_role(Role.PREFILL, context.model):
            self._take_budget(context, computed_tokens)
        tokens = request.prompt_tokens
        ticket = self.pool.reserve(engine, tokens, computing_tokens=computed_tokens)
        answer: EngineResponse | None = None
        span: Span | None = None
        try:
            span, fields = context.begin_leg("kvrouter.forward", engine)
            if request.form is not None:
                fields = b"content-type: %b\r\n%b" % (request.form, fields.partition(b"\r\n")[2])
            sent, as_it_is = (context.exchange.path, fields, body), endpoint is OTHER
            answer = await forward(
                self.client, engine, sent, as_it_is=as_it_is, once=not endpoint.again
            )
            await self._pass_on(context, endpoint, ticket, answer)
        finally:
            ticket.release()
            if answer is not None:
                answer.close()
            if span is not None:
                span.end()
        self.pool.succeeded(engine)

    def _take_budget(self, context: RequestContext, tokens: int) -> None:
        """Let a decode engine compute so many tokens; ApiError 429: there is no room."""
        if not context.resources.recompute(self.budget, tokens):
            message = "The decode engines have no room to compute this prompt."
            raise ApiError(429, message, retry_after_s=self.budget.retry_after_s)

    async def _pass_on(
        self, context: RequestContext, endpoint: Endpoint, ticket: Ticket, answer: EngineResponse
    ) -> None:
        content_type = answer.header(b"content-type") or JSON
        if answer.status == 200 and content_type.startswith("text/event-stream"):
            await self._stream(context, endpoint, ticket, answer)
            return
        if answer.status >= 400:
            words = await words_of(answer, self.client.deadlines.idle_s)
            if endpoint is not OTHER:
                self.pool.succeeded(ticket.engine)
            raise words.told(Role.DECODE)
        any_kind = endpoint is OTHER or answer.status != 200
        body = await self.client.read(ticket.engine, answer, any_kind=any_kind)
        if answer.status == 200:
            self._computed(context, endpoint, ticket)
        if context.exchange.started:  # with comments
            raise ApiError(502, "The engine's answer is no stream.")
        if body is None:
            tidy = partial(tidy_answer, cached_tokens=None)
            body = await pass_on(context, self.client, ticket.engine, answer, tidy)
        else:
            told, fields = tidy_answer(body, None), answer_fields(context)
            context.exchange.respond(answer.status, told, content_type=content_type, fields=fields)
        prompt, generated = answer_usage(body)
        if endpoint.generates:
            context.outcome.count(generated)
        if answer.status == 200:
            _note_prompt(context, endpoint, prompt)

    def _computed(self, context: RequestContext, endpoint: Endpoint, ticket: Ticket) -> None:
        """The engine answers: it has computed the prompt."""
        ticket.computed()
        if endpoint.generates:
            context.answer_began()
            self.inputs_builder.computed(ticket.engine, context.prompt)
        else:
            context.answered_well()

    async def _stream(
        self, context: RequestContext, endpoint: Endpoint, ticket: Ticket, answer: EngineResponse
    ) -> None:
        engine = ticket.engine
        try:
            comments = partial(pass_comments, context)
            await answer.first_event(self.client.deadlines.first_byte_s, comments)
            check_begun(answer)
        except UpstreamError as error:
            raise self.client.verdict(engine, error) from None
        exchange, content = context.exchange, partial(self._computed, context, endpoint, ticket)
        tidy = partial(tidy_events, cached_tokens=None)
        gaps = self.metrics.of(context.model).gaps.buckets
        relay = context.stream = Relay(exchange, answer, gaps, tidy, content=content)
        begin_events(context)
        try:
            await relay.run(self.client.deadlines.idle_s)
        except UpstreamError as error:
            context.outcome.break_off(str(self.client.failed(engine, error)))
            relay.fail(broke_off())
        finally:
            context.outcome.count(relay.generated)
            _note_prompt(context, endpoint, relay.prompt_usage)


def _note_prompt(context: RequestContext, endpoint: Endpoint, usage: PromptUsage) -> None:
    """Note how the engine counted the prompt; the router's estimate if it did not."""
    prompt_tokens, cached_tokens = usage
    if prompt_tokens is None and endpoint.generates:
        prompt_tokens = context.request.prompt_tokens
    context.outcome.count_prompt(prompt_tokens, cached_tokens)


def _read(body: bytes, endpoint: Endpoint) -> Request:
    """What the way of a request depends on: its members and model.

    Raises:
        ApiError: 400.
    """
    try:
        spans, _ = _native.scan_object(body)
    except ValueError as error:
        raise bad_request(f"The body is not a JSON object that can be served: {error}.") from None
    if endpoint.generates and (plain := in_plain_json(body, spans)) is not None:
        return _read(plain, endpoint)
    names = ("model", "stream", *NOT_SERVED)
    given = {name: body[slice(*spans[name])] for name in names if name in spans}
    model, stream = given.pop("model", b"null"), given.pop("stream", b"") == b"true"
    if model != b"null" and not model.startswith(b'"'):
        raise bad_request("`model` must be a string.", "model")
    for name, raw in given.items():
        if endpoint.generates and WHERE_SET.holds(raw):
            message = f"`{name}` is not supported: each engine keeps its own responses."
            raise bad_request(message, name)
    tokens = max(1, text_bytes(body, 0, len(body), BYTES_PER_TOKEN) // BYTES_PER_TOKEN)
    salt = salt_of(body, spans) if "cache_salt" in spans else None
    most = None if endpoint.generates else 0
    return Request("chat", body, spans, orjson.loads(model), stream, most, None, tokens, salt)


def _foreign_error(body: bytes) -> str | None:
    """The message, or "", of an error that is not OpenAI's (TensorRT-LLM's); None: it is."""
    try:
        answer = orjson.loads(bounded(body))
    except ValueError:
        return ""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return None
    told = error or answer.get("message") if isinstance(answer, dict) else None
    return told[:_MESSAGE] if isinstance(told, str) else ""


def _told(words: Words, path: str) -> ApiError | Refused:
    """An engine's error as the client gets it: as it is, or in the words of its API."""
    told = _foreign_error(words.body or b"")
    if told is None:
        return Refused(words, Role.DECODE)
    usual = f"The engine answers {words.status} to {path}."
    return ApiError(words.status, told or usual, retry_after_s=words.retry_after_s)
