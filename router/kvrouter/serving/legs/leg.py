"""One leg of a prompt on one engine, and its accounts: load, span, times, what the engine holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.base import BadAnswer, Handoff, PendingKv, Rendezvous
from kvrouter.http.client.pool import EngineResponse, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.openai.request import OPEN_ENDED_TOKENS, Kind, Request
from kvrouter.serving.legs.engine_client import EngineClient, check_begun
from kvrouter.serving.legs.failures import Refused
from kvrouter.serving.request.forwarded_headers import with_context, with_own_id, without_rank
from kvrouter.serving.request.trace_attributes import end_decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.routing.prefill_priority import PrefillPriorities
    from kvrouter.serving.legs.inputs import InputsBuilder
    from kvrouter.serving.request.context import RequestContext, ResponseSink
    from kvrouter.telemetry.metrics import Metrics

PATHS: Final[Mapping[Kind, str]] = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
}
KINDS: Final[Mapping[str, Kind]] = {path: kind for kind, path in PATHS.items()}


@dataclass(eq=False, slots=True, kw_only=True)
class Legs:
    """Does legs; cancelling one closes its connection, which ends it on its engine."""

    pool: EnginePool  # counts engines that do well
    families: Families  # spell the legs for each engine
    client: EngineClient
    inputs_builder: InputsBuilder  # notes what engines have computed
    priorities: PrefillPriorities  # ranks prefill legs
    metrics: Metrics  # times legs

    async def prefill(
        self,
        context: RequestContext,
        engine: Engine,
        tokens: int,
        rendezvous: Rendezvous | None = None,
    ) -> Handoff:
        """Do the prefill leg; returns the hand-off, which the context holds from then on.

        `tokens` of the prompt are computed. At `rendezvous` the engine meets the decode engine, if
        both legs run at once.

        Raises:
            LegFailed: the engine is to blame.
            Refused: the request is.
        """
        reservations = context.route.reservations
        assert reservations is not None
        context.route.prefill_engine = engine.address
        reservations.begin(Role.PREFILL, engine, tokens)
        begun_s = monotonic()
        span, fields = context.begin_leg("kvrouter.prefill", engine)
        try:
            handoff = await self._ask_prefill(context, engine, tokens, fields, rendezvous)
        finally:
            reservations.leave(Role.PREFILL)
            context.timing.prefilled_s = monotonic()
            if span is not None:
                span.end()
        context.route.handoff = handoff
        self.metrics.prefill.observe(context.timing.prefilled_s - begun_s)
        if handoff.cached_tokens:
            self.metrics.of(context.model).cached_tokens += handoff.cached_tokens
        self.inputs_builder.computed(engine, context.prompt)
        return handoff

    async def _ask_prefill(
        self,
        context: RequestContext,
        engine: Engine,
        tokens: int,
        fields: bytes,
        rendezvous: Rendezvous | None,
    ) -> Handoff:
        request, family = context.prompt.prefilled or context.request, self.families.of(engine)
        known = rendezvous is not None or request.ids is not None
        body = family.prefill_body(
            request,
            prompt_ids=context.prompt.ids,
            want_ids=not known and context.prompt.tokens is None,
            rendezvous=rendezvous,
            priority=self.priorities.of(request, engine, tokens),
            source=context.source(engine),
        )
        if rendezvous is not None:
            fields = without_rank(fields)
        if family.unique_request_ids:
            fields = with_own_id(fields)
        client, path = self.client, PATHS[request.kind]
        answer = await client.ask(engine, Role.PREFILL, path, fields, body, client.deadlines)
        try:
            raw = await client.read_whole(engine, answer, Role.PREFILL)
            handoff = family.read_prefill_answer(raw)
        except BadAnswer as error:
            bad = UpstreamError(Failure.ANSWER, str(error))
            raise client.failed(engine, bad, Role.PREFILL) from None
        self.pool.succeeded(engine)
        if family.unique_request_ids:
            handoff.fields = fields
        return handoff

    async def decode(
        self,
        context: RequestContext,
        sink: ResponseSink,
        engine: Engine,
        pending: PendingKv | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """Do the decode leg: its answer goes to `sink`.

        The engine waits for `pending` KV. At `rendezvous` it meets the prefill engine.

        Raises:
            LegFailed: the engine is to blame, and the client has seen nothing of its answer.
            Refused: the request is.
        """
        request, reservations = context.request, context.route.reservations
        assert reservations is not None
        context.route.attempts += 1
        context.route.decode_engine = engine.address
        reservations.begin(Role.DECODE, engine, decode_tokens(request), computing_tokens(context))
        begun_s = monotonic()
        span, fields = context.begin_leg("kvrouter.decode", engine)
        answer: EngineResponse | None = None
        try:
            comments = partial(sink.comments, context)
            answer = await self._ask_decode(
                context, engine, fields, pending, rendezvous, comments=comments
            )
            context.held.unpin()
            if request.stream:
                await sink.stream(context, engine, answer)
            else:
                await sink.whole(context, engine, answer)
        except Refused:
            context.held.unpin()  # an engine that refuses frees what it was handed
            raise
        finally:
            reservations.leave(Role.DECODE)
            if answer is not None:
                answer.close()
            if span is not None:
                end_decode(context, span)
        self.metrics.decode.observe(monotonic() - begun_s)
        if context.outcome.reason != "broken":  # within a stream: counted as failed already
            self.pool.succeeded(engine)
            self.inputs_builder.computed(engine, context.prompt)

    async def _ask_decode(
        self,
        context: RequestContext,
        engine: Engine,
        fields: bytes,
        pending: PendingKv | None,
        rendezvous: Rendezvous | None,
        *,
        comments: Callable[[bytes], None],
    ) -> EngineResponse:
        """The answer: its events have begun, or it will come whole if it is no stream."""
        request, handoff, client = context.request, context.route.handoff, self.client
        body = self.families.of(engine).decode_body(
            request,
            handoff,
            prompt_ids=context.prompt.ids,
            pending=pending,
            rendezvous=rendezvous,
            want_ids=context.reports_tokens,
            source=context.source(engine) if pending is None else pending.node,
        )
        deadlines = client.deadlines
        if pending is not None:
            deadlines = replace(deadlines, first_byte_s=deadlines.first_byte_s + pending.wait_s)
        if handoff is not None and handoff.fields is not None:
            fields = with_context(handoff.fields, fields)
        path = request.path or PATHS[request.kind]
        answer = await client.ask(engine, Role.DECODE, path, fields, body, deadlines)
        if not request.stream:
            return answer
        try:
            content_type = answer.header(b"content-type") or ""
            if not content_type.startswith("text/event-stream"):
                await client.read_whole(engine, answer)
                raise UpstreamError(Failure.ANSWER, f"a stream of {content_type[:80]!r}")
            await answer.first_event(deadlines.first_byte_s, comments)
            check_begun(answer)
        except UpstreamError as error:
            answer.close()
            raise client.verdict(engine, error) from None
        return answer


def decode_tokens(request: Request) -> int:
    """The load of a decode leg: tokens of its prompt, and those that it will generate at most."""
    return request.prompt_tokens + (request.max_tokens or OPEN_ENDED_TOKENS) * request.n


def computing_tokens(context: RequestContext) -> int:
    """Tokens of the prompt that its decode engine will compute, as far as is known by now."""
    plan = context.route.plan
    if plan is None or plan.prefill is not None:
        return context.held.grant_tokens or 0
    return plan.computed_tokens
