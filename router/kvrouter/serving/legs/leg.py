"""One leg of a prompt on one engine, and its accounts: load, span, times, what the engine holds.

`EngineClient` asks engines over kept connections; it never chooses one or tries another.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.base import BadAnswer, Handoff, PendingKv, Rendezvous
from kvrouter.http.client.pool import ConnectionPool, Deadlines, EngineResponse, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.openai.endpoints import CHATS, COMPLETIONS
from kvrouter.openai.request import OPEN_ENDED_TOKENS, Kind, Request
from kvrouter.openai.response import is_json
from kvrouter.serving.legs.failures import LegFailed, Refused
from kvrouter.serving.legs.verdict import Judge, look
from kvrouter.serving.request.context import with_context, with_own_id, without_rank
from kvrouter.serving.request.trace_attributes import end_decode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from kvrouter.credentials.tls import Trust
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.deadlines import DeadlineTimer
    from kvrouter.routing.plan import PrefillPriorities
    from kvrouter.routing.planner.queue import PrefillQueue
    from kvrouter.serving.legs.inputs import InputsBuilder
    from kvrouter.serving.request.context import RequestContext, ResponseSink
    from kvrouter.telemetry.metrics import Metrics

MAX_ANSWER_BYTES: Final = 64 << 20  # of answers that must be whole
KEPT_BYTES: Final = 8 << 20
"""Of other answers, until which another engine can still answer; more is passed on as it comes."""
_LOOKED_BYTES: Final = 4096
_EVENT_BYTES: Final = 64 << 10
PATHS: Final[Mapping[Kind, str]] = {"completion": COMPLETIONS, "chat": CHATS}
KINDS: Final[Mapping[str, Kind]] = {path: kind for kind, path in PATHS.items()}


def check_plain(answer: EngineResponse) -> None:
    """Raise UpstreamError, and close the answer, if its body is encoded."""
    if answer.coding is not None:
        answer.close()
        raise UpstreamError(Failure.ANSWER, f"its answer is encoded ({answer.coding}), unasked")


def check_begun(answer: EngineResponse) -> None:
    """Raise UpstreamError if a stream has ended without an event, or begins with an error."""
    if answer.complete and not answer.begun:
        raise UpstreamError(Failure.ANSWER, "a stream without an event")
    if _marked(answer.beginning(_LOOKED_BYTES)):
        look(answer.beginning(_EVENT_BYTES))


def _marked(data: bytes) -> bool:
    """Whether it may say that it did not work."""
    return b'"error"' in data or b"abort" in data or b"cancelled" in data


@dataclass(eq=False, slots=True, kw_only=True)
class EngineClient(Judge):
    """Owns the connections to all engines; `close` ends those that are idle."""

    timer: DeadlineTimer  # checks deadlines
    trust: Trust  # certificates to trust for engines that are reached by HTTPS
    _pools: dict[Engine, ConnectionPool] = field(default_factory=dict, init=False)

    async def ask(  # noqa: PLR0917
        self,
        engine: Engine,
        leg: Role,
        path: str,
        fields: bytes,
        body: bytes,
        deadlines: Deadlines,
    ) -> EngineResponse:
        """The head of an engine's 200 to a leg. The caller must take the body or close it.

        Raises:
            LegFailed: the engine is to blame.
            Refused: the request is.
            ApiError: the request is, in a body that cannot be read.
        """
        if engine.server.draining:  # since it was chosen
            raise LegFailed(engine, Failure.REFUSED, "it is being removed")
        try:
            answer = await self.send(engine, path, fields, body, deadlines)
            if answer.status == 200:
                check_plain(answer)
                return answer
        except UpstreamError as error:
            raise self.failed(engine, error, leg) from None
        raise await self.not_well(engine, leg, answer)

    async def read(
        self,
        engine: Engine,
        answer: EngineResponse,
        leg: Role = Role.DECODE,
        *,
        kept_bytes: int = KEPT_BYTES,
        any_kind: bool = False,
    ) -> bytes | None:
        """The body of a 200; None: it is longer than `kept_bytes`, and the rest is still to come.

        Raises:
            LegFailed: the engine is to blame; unless `any_kind`, for what is no answer too.
            Refused, ApiError: the request is.
        """
        try:
            body = answer.whole(kept_bytes)
            if body is None:
                if not await answer.gather(kept_bytes, self.deadlines.idle_s):
                    return None
                body = answer.whole(kept_bytes) or b""
            if not any_kind and not is_json(body):
                raise UpstreamError(Failure.ANSWER, f"its answer is no JSON: {body[:40]!r}")
            if not any_kind and _marked(body):
                look(body)
        except UpstreamError as error:
            raise self.verdict(engine, error, leg) from None
        return body

    async def read_whole(
        self, engine: Engine, answer: EngineResponse, leg: Role = Role.DECODE
    ) -> bytes:
        """As `read`, of an answer that nothing can be done with in parts."""
        body = await self.read(engine, answer, leg, kept_bytes=MAX_ANSWER_BYTES)
        if body is None:
            answer.close()
            long = UpstreamError(Failure.TOO_LARGE, f"it exceeds {MAX_ANSWER_BYTES} bytes")
            raise self.failed(engine, long, leg)
        return body

    def connections(self, engine: Engine) -> ConnectionPool:
        """All connections to `engine`."""
        pool = self._pools.get(engine)
        if pool is None:
            pool = self._pools[engine] = ConnectionPool(
                engine.host,
                engine.port,
                self.timer,
                tls=lambda: self.trust.context if engine.server.tls else None,
            )
        return pool

    def engine_joined(self, engine: Engine) -> None:
        """It is reached again if it was cut off."""
        if self.connections(engine).cut_off:
            self._pools.pop(engine).close()

    def engine_left(self, engine: Engine) -> None:
        """Close its idle connections; those in use end with their legs."""
        if engine in self._pools:
            self._pools[engine].close()

    def forget(self, engine: Engine) -> None:
        """`engine` is removed for good; legs that still run on it break off."""
        pool = self._pools.pop(engine, None)
        if pool is not None:
            pool.close()
            if engine.requests:
                pool.cut(Failure.BROKEN, "the engine was removed")

    def close(self) -> None:
        """Close every idle connection."""
        for pool in self._pools.values():
            pool.close()

    def send(
        self,
        engine: Engine,
        path: str,
        fields: bytes,
        body: bytes,
        deadlines: Deadlines,
        *,
        once: bool = False,
    ) -> Awaitable[EngineResponse]:
        """POST to the engine's rank, GET without a body; UpstreamError: no answer came."""
        if engine.rank_line:
            fields = without_rank(fields) + engine.rank_line
        fields = self.worker_keys.shown(engine.server.address, fields)
        pool = self._pools.get(engine) or self.connections(engine)
        method = "POST" if body else "GET"
        return pool.send(method, path, fields=fields, body=(body,), deadlines=deadlines, once=once)


@dataclass(eq=False, slots=True, kw_only=True)
class Legs:
    """Does legs; cancelling one closes its connection, which ends it on its engine."""

    pool: EnginePool  # counts engines that do well
    families: Families  # spell the legs for each engine
    client: EngineClient
    inputs_builder: InputsBuilder  # notes what engines have computed
    priorities: PrefillPriorities  # ranks prefill legs
    queue: PrefillQueue | None  # learns how long prefill legs take; None: prompts wait in none
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
        context.route.note_prefill(engine.address)
        reservations.begin(Role.PREFILL, engine, tokens)
        begun_s = ended_s = monotonic()
        span, fields = context.begin_leg("kvrouter.prefill", engine)
        try:
            handoff = await self._ask_prefill(context, engine, tokens, fields, rendezvous)
        finally:
            reservations.end(Role.PREFILL)
            ended_s = context.timing.prefilled()
            if span is not None:
                span.end()
        context.route.note_handoff(handoff)
        self.metrics.prefill.observe(ended_s - begun_s)
        if self.queue is not None and context.route.plan is not None:
            work_s, took_s = context.route.plan.work_s, engine.prefilling.ran_s
            self.queue.learn(context.model, tokens, work_s, took_s)
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
        context.route.note_decode(engine.address)
        reservations.begin(Role.DECODE, engine, decode_tokens(request), computing_tokens(context))
        begun_s = monotonic()
        span, fields = context.begin_leg("kvrouter.decode", engine)
        answer: EngineResponse | None = None
        try:
            answer = await self._ask_decode(
                context, sink, engine, fields, pending=pending, rendezvous=rendezvous
            )
            context.resources.unpin()
            if request.stream:
                await sink.stream(context, engine, answer)
            else:
                await sink.whole(context, engine, answer)
        except Refused:
            context.resources.unpin()  # an engine that refuses frees what it was handed
            raise
        finally:
            reservations.end(Role.DECODE)
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
        sink: ResponseSink,
        engine: Engine,
        fields: bytes,
        *,
        pending: PendingKv | None,
        rendezvous: Rendezvous | None,
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
            source=context.source(engine, pending),
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
            await answer.first_event(deadlines.first_byte_s, partial(sink.comments, context))
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
        return context.resources.grant_tokens or 0
    return plan.computed_tokens
