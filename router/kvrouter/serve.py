"""The life of a request: ten steps from its body to its last byte."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.engine import Failure, Role
from kvrouter.errors import ApiError
from kvrouter.http.client import UpstreamError
from kvrouter.http.head import SSE_HEADERS, encode_headers
from kvrouter.leg import MAX_ANSWER_BYTES, LegFailed, Refused
from kvrouter.openai import answer_usage, parse, tidy_answer
from kvrouter.passage import Passage, RequestIds, leg_fields
from kvrouter.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from kvrouter.budget import Admission, RecomputeBudget
    from kvrouter.dispatch import Ahead
    from kvrouter.engine import Engine
    from kvrouter.families.base import Coming
    from kvrouter.handover import Handover
    from kvrouter.http.client import Answer
    from kvrouter.http.exchange import Exchange
    from kvrouter.leg import Legs
    from kvrouter.log import RequestLog
    from kvrouter.metrics import Metrics
    from kvrouter.models import ModelNames
    from kvrouter.openai import Kind
    from kvrouter.plan import RouteInputs
    from kvrouter.policies.base import Policy
    from kvrouter.pool import Pool
    from kvrouter.survey import Survey

MAX_ATTEMPTS: Final = 3
"""Engines asked at most for one leg of one request."""
OPEN_ENDED_TOKENS: Final = 256
"""Tokens that a request without max_tokens is taken to generate, for load alone."""
_SSE_FIELDS: Final = encode_headers(SSE_HEADERS)


class Router:
    """Serves completions and chats on the engines of a pool.

    Every step of a request runs in its handler's task: when the client leaves, the task is
    cancelled, which closes the leg under way, gives back tickets, lease and grant, and writes
    the request's line.

    Args:
        pool: the engines.
        policy: chooses among them.
        survey: gathers what it decides upon.
        legs: asks engines.
        handover: awaits landings.
        ahead: sends decode legs ahead of them.
        budget: bounds what decode engines may compute for want of KV.
        admission: bounds the requests under way.
        metrics: counts and times.
        log: takes a line per request, or None.
        models: which models there are.
        split: whether there are prefill engines at all, be they away or not.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        policy: Policy,
        survey: Survey,
        legs: Legs,
        handover: Handover,
        ahead: Ahead,
        budget: RecomputeBudget,
        admission: Admission,
        metrics: Metrics,
        log: RequestLog | None,
        models: ModelNames,
        split: bool,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._survey = survey
        self._legs = legs
        self._handover = handover
        self._ahead = ahead
        self._budget = budget
        self._admission = admission
        self._metrics = metrics
        self._log = log
        self._models = models
        self._split = split
        self._ids = RequestIds()

    def completions(self, exchange: Exchange) -> Awaitable[None]:
        """POST /v1/completions."""
        return self.serve(exchange, "completion")

    def chat(self, exchange: Exchange) -> Awaitable[None]:
        """POST /v1/chat/completions."""
        return self.serve(exchange, "chat")

    async def serve(self, exchange: Exchange, kind: Kind) -> None:
        """Answer one request. Never raises but when it is cancelled."""
        request_id = self._ids.of(exchange.headers)
        fields = leg_fields(request_id, exchange.headers)
        passage = Passage(exchange, request_id, fields, monotonic())
        entered = self._admission.enter()
        self._metrics.running += 1
        try:
            if not entered:
                raise ApiError(429, "Too many requests are under way.", retry_after_s=1)
            await self._route(passage, kind)
        except ApiError as error:
            self._answer_error(passage, error)
        except Refused as refused:
            passage.outcome = "refused"
            exchange.respond(
                refused.status,
                refused.body,
                content_type=refused.content_type,
                fields=_id_line(passage),
            )
        except asyncio.CancelledError:
            passage.outcome = "client_left" if exchange.closed else "cut_off"
            raise
        finally:
            self._metrics.running -= 1
            if entered:
                self._admission.leave()
            self.settle(passage)

    async def _route(self, passage: Passage, kind: Kind) -> None:
        request = passage.request = parse(passage.exchange.body, kind)
        model = self._models.resolve(request.model)
        decode = self._pool.engines(Role.DECODE, model)
        if not decode:
            raise ApiError(503, "No decode engine is available.", retry_after_s=1)
        prefill = self._pool.engines(Role.PREFILL, model)
        inputs = await self._survey.inputs(passage, model, decode, prefill)
        passage.plan = self._policy.plan(inputs)
        passage.planned_s = monotonic()
        self._note_plan(passage, inputs)
        coming = self._ahead.announce(passage)
        if passage.plan.prefill is not None and coming is None:
            await self.prefill(passage, passage.plan.prefill, inputs)
        elif coming is None and passage.plan.why == "no prefill engine" and self._split:
            self._recompute(passage, passage.plan.missing_tokens)
        await self.decode(passage, model, passage.plan.decode, inputs, coming)

    async def prefill(self, passage: Passage, engine: Engine, inputs: RouteInputs) -> None:
        """The prefill leg and its landing; where both fail, decode recomputes within the budget.

        An engine that refuses connections has computed nothing, so another takes the leg. After
        any other failure decode does without, while the budget allows, else another engine.
        """
        tried = {engine}
        while True:
            try:
                await self._prefill_on(passage, engine, inputs)
                return
            except LegFailed as failed:
                if passage.provided:
                    return
                others = [e for e in inputs.prefill if e not in tried]
                again = bool(others) and len(tried) < MAX_ATTEMPTS
                passage.error = str(failed)
                if not (again and failed.failure is Failure.REFUSED):
                    missing = passage.plan.missing_tokens if passage.plan else 0
                    passage.grant = self._budget.take(missing)
                    if passage.grant is not None:
                        return
                if not again:
                    raise self._over_budget() from None
            decode = inputs.decode if passage.plan is None else (passage.plan.decode,)
            plan = self._policy.plan(_without(inputs, prefill=others, decode=decode))
            if plan.prefill is None:
                self._recompute(passage, plan.missing_tokens)
                return
            engine = plan.prefill
            tried.add(engine)

    async def _prefill_on(self, passage: Passage, engine: Engine, inputs: RouteInputs) -> None:
        request, plan = passage.request, passage.plan
        assert request is not None
        assert plan is not None
        passage.prefill_engine = engine.address
        ticket = self._pool.reserve(engine, plan.missing_tokens)
        begun_s = monotonic()
        try:
            passage.handoff = await self._legs.prefill(
                engine,
                request,
                passage.fields,
                prompt_ids=passage.prompt_ids,
                want_ids=request.ids is None and passage.tokens is None,
            )
        finally:
            ticket.release()
        self._metrics.prefill.observe(monotonic() - begun_s)
        self._policy.leg_done(engine, Role.PREFILL, plan.missing_tokens)
        self._survey.computed(engine, passage.hashes)
        missing = await self._handover.land(passage)
        if missing:
            self._recompute(passage, missing)

    async def decode(
        self,
        passage: Passage,
        model: str,
        engine: Engine,
        inputs: RouteInputs,
        coming: Coming | None,
    ) -> None:
        """The decode leg, on another engine as long as the client has seen nothing of it.

        With `coming` the prefill leg is still to be done: the first engine gets both at once.
        """
        tried: list[Engine] = []
        while True:
            tried.append(engine)
            try:
                if coming is None or not await self._both(passage, engine, coming, inputs):
                    await self._decode_on(passage, engine)
                return
            except LegFailed as failed:
                passage.error = str(failed)
                others = [e for e in self._pool.engines(Role.DECODE, model) if e not in tried]
                if not others or len(tried) >= MAX_ATTEMPTS:
                    raise _decode_error(failed) from None
            inputs, coming = _without(inputs, decode=others, prefill=()), None
            engine = self._policy.plan(inputs).decode

    def _both(
        self, passage: Passage, engine: Engine, coming: Coming, inputs: RouteInputs
    ) -> Awaitable[bool]:
        assert passage.plan is not None
        assert passage.plan.prefill is not None
        prefill = self.prefill(passage, passage.plan.prefill, inputs)
        decode = partial(self._decode_on, passage, engine, coming)
        return self._ahead.serve(passage, coming, prefill, decode)

    async def _decode_on(
        self, passage: Passage, engine: Engine, coming: Coming | None = None
    ) -> None:
        request = passage.request
        assert request is not None
        passage.attempts += 1
        passage.decode_engine = engine.address
        generated = request.max_tokens or OPEN_ENDED_TOKENS
        ticket = self._pool.reserve(engine, request.prompt_tokens + generated)
        begun_s = monotonic()
        answer: Answer | None = None
        try:
            answer = await self._legs.decode(
                engine,
                request,
                passage.fields,
                passage.handoff,
                prompt_ids=passage.prompt_ids,
                coming=coming,
            )
            if request.stream:
                await self.relay(passage, engine, answer)
            else:
                body = answer.whole(MAX_ANSWER_BYTES)
                if body is None:
                    body = await self._legs.read(engine, answer)
                self._answer_whole(passage, body)
        finally:
            ticket.release()
            if answer is not None:
                answer.close()
        self._metrics.decode.observe(monotonic() - begun_s)
        self._pool.succeeded(engine)
        spared = passage.handoff or coming or passage.plan is None
        missing = 0 if spared or passage.plan is None else passage.plan.missing_tokens
        self._policy.leg_done(engine, Role.DECODE, missing)
        self._survey.computed(engine, passage.hashes)

    async def relay(self, passage: Passage, engine: Engine, answer: Answer) -> None:
        """Pass a stream on; one that breaks off ends with an error event."""
        exchange = passage.exchange
        exchange.start(200, fields=_SSE_FIELDS + _id_line(passage), hold=True)
        relay = Relay(exchange, answer, self._metrics.gaps.counts)
        passage.began(monotonic())
        try:
            await relay.run(self._legs.deadlines.idle_s)
        except UpstreamError as error:
            failed = self._legs.failed(engine, Role.DECODE, error.failure, str(error))
            passage.error = str(failed)
            passage.outcome = "broken"
            relay.fail(ApiError(502, "The engine's answer broke off."))
        else:
            passage.outcome = relay.finish_reason()
        passage.generated = relay.events

    def settle(self, passage: Passage) -> None:
        """Give back what is held, count, and write the request's line."""
        passage.release()
        metrics, now_s = self._metrics, monotonic()
        exchange = passage.exchange
        well = exchange.status == 200 and passage.outcome not in _NOT_WELL
        if well:
            metrics.success.add(1, passage.outcome)
            metrics.e2e.observe(now_s - passage.started_s)
            metrics.ttft.observe((passage.first_s or now_s) - passage.started_s)
            metrics.generation_tokens.add(passage.generated)
        else:
            code = "499" if passage.outcome == "client_left" else str(exchange.status)
            metrics.errors.add(1, code)
        if self._log is None:
            return
        self._log.write(passage.line(exchange.status, now_s))

    def _answer_whole(self, passage: Passage, body: bytes) -> None:
        handoff = passage.handoff
        passage.began(monotonic())
        prompt, completion, passage.outcome = answer_usage(body)
        passage.generated = completion or 0
        told = handoff.prompt_tokens if handoff is not None else None
        if told is not None and prompt is not None and prompt != told:
            self._metrics.usage_mismatch.add()
        body = tidy_answer(body, handoff.cached_tokens if handoff else None)
        passage.exchange.respond(200, body, fields=_id_line(passage))

    def _answer_error(self, passage: Passage, error: ApiError) -> None:
        passage.outcome = "error"
        passage.error = passage.error or error.message
        exchange = passage.exchange
        exchange.respond(
            error.status, error.body(), headers=error.headers(), fields=_id_line(passage)
        )

    def _note_plan(self, passage: Passage, inputs: RouteInputs) -> None:
        plan, metrics = passage.plan, self._metrics
        assert plan is not None
        metrics.overhead.observe(passage.planned_s - passage.started_s)
        metrics.plans.add(1, plan.why)
        metrics.prompt_tokens.add(inputs.prompt_tokens)
        own = inputs.matches.get(plan.decode, 0) if inputs.matches else 0
        if own:
            metrics.hit_tokens.add(own * inputs.block_tokens, "engine")
        stored = inputs.store_blocks.get(plan.decode.manifest or "", 0)
        if stored > own:
            metrics.hit_tokens.add((stored - own) * inputs.block_tokens, "store")

    def _recompute(self, passage: Passage, tokens: int) -> None:
        """Let decode compute `tokens` of the prompt, if the fleet's budget allows.

        Raises:
            ApiError: 429: it does not.
        """
        if tokens <= 0 or passage.grant is not None or passage.provided:
            return
        passage.grant = self._budget.take(tokens)
        if passage.grant is None:
            raise self._over_budget()

    def _over_budget(self) -> ApiError:
        return ApiError(
            429,
            "The KV of this prompt is not available and the engines have no room to compute it.",
            retry_after_s=self._budget.retry_after_s,
        )


_NOT_WELL: Final = frozenset({"broken", "client_left", "cut_off", "error", "refused"})


def _without(
    inputs: RouteInputs,
    *,
    prefill: Sequence[Engine] | None = None,
    decode: Sequence[Engine] | None = None,
) -> RouteInputs:
    changes: dict[str, Sequence[Engine]] = {}
    if prefill is not None:
        changes["prefill"] = prefill
    if decode is not None:
        changes["decode"] = decode
    return replace(inputs, **changes)  # type: ignore[arg-type]


def _decode_error(failed: LegFailed) -> ApiError:
    if failed.failure is Failure.TIMEOUT:
        return ApiError(504, "The engine did not answer in time.")
    return ApiError(503, "No decode engine could answer.", retry_after_s=1)


def _id_line(passage: Passage) -> bytes:
    return b"x-request-id: %b\r\n" % passage.request_id.encode("latin-1")
