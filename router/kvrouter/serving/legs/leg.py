"""One leg of a request: asks one engine in its family's words and tells the pool how it went.

It never chooses an engine and never tries another one: that is `serve`'s.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Role
from kvrouter.engines.families.base import BadAnswer
from kvrouter.errors import ApiError
from kvrouter.http.client.pool import Deadlines, EngineResponse, Links, Upstream, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.serving.request.forwarded_headers import with_context, with_own_id, without_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.credentials.engine_keys import WorkerKeys
    from kvrouter.credentials.tls import Trust
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.engines.families.base import Handoff, PendingKv, Rendezvous
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.deadlines import DeadlineTimer
    from kvrouter.openai.request import Kind, Request
    from kvrouter.telemetry.metrics import Metrics

MAX_ATTEMPTS: Final = 3
"""Engines asked at most for one leg of one request."""
NOT_TAKEN: Final = frozenset({Failure.REFUSED, Failure.CONNECT})
"""Failures of an engine that has not seen the request."""
MAX_ANSWER_BYTES: Final = 64 << 20
MAX_ERROR_BYTES: Final = 1 << 20
PATHS: Final[Mapping[Kind, str]] = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_ERROR_BYTES: Final = 4096
_ERROR: Final = re.compile(rb'[^{}]{0,32}data: {"error": ?{[^{}]*"code": ?5\d\d\b')
"""The beginning of a stream, perhaps in a chunk's frame: a 5xx that came too late for a status."""
_NO_RANK: Final = re.compile(rb"(?:data_parallel_rank \d+ is|routed_dp_rank=\d+) out of range")
"""How vLLM and SGLang refuse a rank (input_processor.py; managers/tokenizer_manager.py)."""
_TOKENIZE_DEADLINES: Final = Deadlines(connect_s=2.0, first_byte_s=5.0, idle_s=5.0)
_POST_FIELDS: Final = b"content-type: application/json\r\n"


class LegFailed(Exception):
    """An engine did not do its leg; another one may."""

    def __init__(self, engine: Engine, failure: Failure, message: str) -> None:
        super().__init__(f"{engine.address}: {message}")
        self.engine = engine
        self.failure = failure


class EngineFull(LegFailed):
    """An engine has no room (429): it has done nothing, and is not ill."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, Failure.STATUS, "it is full")


class Refused(Exception):
    """An engine refused the request itself (4xx): its answer is the client's answer."""

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"refused with {status}")
        self.status = status
        self.body = body
        self.content_type = content_type


def decode_error(failed: LegFailed) -> ApiError:
    """What the client is told where no engine did its part."""
    if failed.failure is Failure.TIMEOUT:
        return ApiError(504, "The engine did not answer in time.")
    if failed.failure is Failure.ANSWER:
        return ApiError(502, "The engine's answer cannot be served.")
    return ApiError(503, "No decode engine could answer.", retry_after_s=1)


def encoding(answer: EngineResponse) -> str | None:
    """The coding of an answer's body, where it has one although none was asked for."""
    coding = answer.header(b"content-encoding")
    return None if coding is None or coding.lower() == "identity" else coding[:40]


def check_plain(answer: EngineResponse) -> None:
    """Look at the head of an answer whose body is to be read or passed on. Closes it on failure.

    Raises:
        UpstreamError: its body cannot be read.
    """
    coding = encoding(answer)
    if coding is not None:
        answer.close()
        raise UpstreamError(Failure.ANSWER, f"its answer is encoded ({coding}), unasked")


def check_begun(answer: EngineResponse) -> None:
    """Look at a stream whose first piece has come.

    Raises:
        UpstreamError: it has ended without one.
    """
    if answer.complete and not answer.beginning(1):
        raise UpstreamError(Failure.ANSWER, "a stream without an event")


def is_json(body: bytes) -> bool:
    """Whether `body` can be an answer of OpenAI's API, by its first and last character alone."""
    body = body.strip()
    return body[:1] + body[-1:] in (b"{}", b"[]")


class Legs:
    """Sends legs. Owns the connections to all engines; `close` ends those that are idle.

    Args:
        pool: is told which engines fail and which do well.
        families: spell the legs for each engine.
        watch: checks deadlines.
        deadlines: of every leg.
        metrics: counts failures.
        worker_keys: what engines are shown.
        trust: whom to trust that is reached by HTTPS.
    """

    def __init__(
        self,
        pool: EnginePool,
        families: Families,
        watch: DeadlineTimer,
        deadlines: Deadlines,
        metrics: Metrics,
        *,
        worker_keys: WorkerKeys,
        trust: Trust,
    ) -> None:
        self._pool = pool
        self._families = families
        self._watch = watch
        self._metrics = metrics
        self._worker_keys = worker_keys
        self._trust = trust
        self._upstreams: dict[Engine, Upstream] = {}
        self._links: dict[Engine, Links] = {}
        self.deadlines = deadlines

    async def prefill(
        self,
        engine: Engine,
        request: Request,
        fields: bytes,
        *,
        prompt_ids: bytes | None,
        want_ids: bool,
        rendezvous: Rendezvous | None = None,
        priority: int | None = None,
    ) -> Handoff:
        """Do the prefill leg on `engine`; cancelling closes its connection, which ends it there.

        Raises:
            LegFailed: the engine is to blame.
            Refused: the request is.
        """
        family = self._families.of(engine)
        body = family.prefill_body(
            request,
            prompt_ids=prompt_ids,
            want_ids=want_ids,
            rendezvous=rendezvous,
            priority=priority,
        )
        if family.unique_request_ids:
            fields = with_own_id(fields)
        path = PATHS[request.kind]
        answer = await self._ask(engine, Role.PREFILL, path, fields, body, self.deadlines)
        try:
            raw = answer.whole(MAX_ANSWER_BYTES)
            if raw is None:
                raw = await answer.read(MAX_ANSWER_BYTES, self.deadlines.idle_s)
            handoff = family.read_prefill_answer(raw)
        except UpstreamError as error:
            raise self.failed(engine, Role.PREFILL, error.failure, str(error)) from None
        except BadAnswer as error:
            raise self.failed(engine, Role.PREFILL, Failure.ANSWER, str(error)) from None
        self._pool.succeeded(engine)
        if family.unique_request_ids:
            handoff.fields = fields
        return handoff

    async def decode(
        self,
        engine: Engine,
        request: Request,
        fields: bytes,
        handoff: Handoff | None,
        *,
        prompt_ids: bytes | None,
        pending: PendingKv | None = None,
        rendezvous: Rendezvous | None = None,
        want_ids: bool = False,
    ) -> EngineResponse:
        """Begin the decode leg: the answer's body has begun, or is there whole if not a stream.

        The caller must take the answer to its end or close it. With `pending` the engine has as
        much longer for the first byte as it may have to wait for that.

        Raises:
            LegFailed: the engine is to blame, and the client has seen nothing of its answer.
            Refused: the request is.
        """
        body = self._families.of(engine).decode_body(
            request,
            handoff,
            prompt_ids=prompt_ids,
            pending=pending,
            rendezvous=rendezvous,
            want_ids=want_ids,
        )
        deadlines = self.deadlines
        if pending is not None:
            first_byte_s = deadlines.first_byte_s + pending.wait_s
            deadlines = replace(deadlines, first_byte_s=first_byte_s)
        if handoff is not None and handoff.fields is not None:
            fields = with_context(handoff.fields, fields)
        path = PATHS[request.kind]
        answer = await self._ask(engine, Role.DECODE, path, fields, body, deadlines)
        try:
            if not request.stream:
                return answer
            content_type = answer.header(b"content-type") or ""
            if not content_type.startswith("text/event-stream"):
                raise UpstreamError(Failure.ANSWER, f"a stream of {content_type[:80]!r}")
            await answer.first_piece(deadlines.first_byte_s)
            check_begun(answer)
            if _ERROR.match(answer.beginning(_ERROR_BYTES)):
                raise UpstreamError(Failure.STATUS, "its stream begins with an error")
        except UpstreamError as error:
            answer.close()
            raise self.failed(engine, Role.DECODE, error.failure, str(error)) from None
        return answer

    async def read(self, engine: Engine, answer: EngineResponse) -> bytes:
        """The whole body of a decode leg's answer.

        Raises:
            LegFailed: it broke off, did not come in time, or is a 200 without JSON.
        """
        body = answer.whole(MAX_ANSWER_BYTES)
        try:
            if body is None:
                body = await answer.read(MAX_ANSWER_BYTES, self.deadlines.idle_s)
        except UpstreamError as error:
            raise self.failed(engine, Role.DECODE, error.failure, str(error)) from None
        if answer.status == 200 and not is_json(body):
            message = f"its answer is no JSON: {body[:40]!r}"
            raise self.failed(engine, Role.DECODE, Failure.ANSWER, message)
        return body

    async def forward(
        self, engine: Engine, path: str, fields: bytes, body: bytes
    ) -> EngineResponse:
        """Pass on a request that is no leg: what the engine says to it is its answer.

        The caller must take the answer to its end or close it, and tell the pool how it went.

        Raises:
            LegFailed: no answer came, or one that tells of the engine and not of the request.
        """
        leg, deadlines = Role.DECODE, self.deadlines
        fields = self._fields(engine, fields)
        try:
            answer = await self._upstream(engine).send(
                "POST", path, fields=fields, body=(body,), deadlines=deadlines
            )
            status = answer.status
            if status == 200:
                check_plain(answer)
            ours = self._worker_keys.judged(engine.server.address, status)
            if status == 501 or (status < 500 and status != 429 and not ours):
                return answer
            await answer.read(MAX_ERROR_BYTES, deadlines.idle_s)
        except UpstreamError as error:
            raise self.failed(engine, leg, error.failure, str(error)) from None
        if status == 429:
            self._metrics.upstream_errors[leg.value, "full"] += 1
            raise EngineFull(engine)
        raise self.failed(engine, leg, Failure.STATUS, f"it answers {status}")

    async def post(self, engine: Engine, path: str, body: bytes) -> bytes:
        """The body of the engine's 200 to a POST; for calls that are no legs.

        Raises:
            OSError: no answer came.
            ValueError: the answer is not a 200.
        """
        upstream, fields = self._upstream(engine), self._fields(engine, _POST_FIELDS)
        try:
            answer = await upstream.send(
                "POST", path, fields=fields, body=(body,), deadlines=_TOKENIZE_DEADLINES
            )
            content = await answer.read(MAX_ANSWER_BYTES, _TOKENIZE_DEADLINES.idle_s)
        except UpstreamError as error:
            raise OSError(str(error)) from None
        if answer.status != 200:
            raise ValueError(f"{path} answers {answer.status}")
        return content

    async def status(self, engine: Engine, path: str, fields: bytes, body: bytes) -> int:
        """The status of the engine's answer to a POST that is no leg, within a few seconds.

        Raises:
            OSError: no answer came.
        """
        fields = self._fields(engine, fields)
        try:
            answer = await self._upstream(engine).send(
                "POST", path, fields=fields, body=(body,), deadlines=_TOKENIZE_DEADLINES
            )
            await answer.read(MAX_ERROR_BYTES, _TOKENIZE_DEADLINES.idle_s)
        except UpstreamError as error:
            raise OSError(str(error)) from None
        return answer.status

    def failed(self, engine: Engine, leg: Role, failure: Failure, message: str) -> LegFailed:
        """Count a failed leg and tell the pool; returns what to raise."""
        self._metrics.upstream_errors[leg.value, failure.value] += 1
        self._pool.failed(engine, failure)
        return LegFailed(engine, failure, message)

    def engine_left(self, engine: Engine) -> None:
        """Its idle connections close; those in use end with their legs."""
        upstream = self._upstreams.pop(engine, None)
        if upstream is not None:
            upstream.close()

    def forget(self, engine: Engine) -> None:
        """`engine` is removed for good; legs that are under way on it all the same break off."""
        self.engine_left(engine)
        links = self._links.pop(engine, None)
        if links is not None and engine.requests:
            links.cut()

    def close(self) -> None:
        """Close every idle connection."""
        for engine in list(self._upstreams):
            self.engine_left(engine)

    def _fields(self, engine: Engine, fields: bytes) -> bytes:
        """Header lines of a request as `engine` gets them: to its rank, with its key."""
        if engine.rank_line:
            fields = without_rank(fields) + engine.rank_line
        return self._worker_keys.shown(engine.server.address, fields)

    def _upstream(self, engine: Engine) -> Upstream:
        upstream = self._upstreams.get(engine)
        if upstream is None:
            links = self._links.setdefault(engine, Links())
            tls = self._trust.context if engine.server.tls else None
            upstream = Upstream(engine.host, engine.port, self._watch, links=links, tls=tls)
            self._upstreams[engine] = upstream
        return upstream

    async def _ask(  # noqa: PLR0917
        self,
        engine: Engine,
        leg: Role,
        path: str,
        fields: bytes,
        body: bytes,
        deadlines: Deadlines,
    ) -> EngineResponse:
        if engine.server.draining:  # since it was chosen
            raise LegFailed(engine, Failure.REFUSED, "it is being removed")
        fields = self._fields(engine, fields)
        try:
            answer = await self._upstream(engine).send(
                "POST", path, fields=fields, body=(body,), deadlines=deadlines
            )
        except UpstreamError as error:
            raise self.failed(engine, leg, error.failure, str(error)) from None
        try:
            if answer.status == 200:
                check_plain(answer)
                return answer
            content = await answer.read(MAX_ERROR_BYTES, self.deadlines.idle_s)
        except UpstreamError as error:
            raise self.failed(engine, leg, error.failure, str(error)) from None
        if answer.status == 429:  # full, not ill
            self._metrics.upstream_errors[leg.value, "full"] += 1
            raise EngineFull(engine)
        if engine.rank is not None and _NO_RANK.search(content):
            self._pool.leave(engine)  # it has fewer ranks than it told: it is introduced anew
            raise self.failed(engine, leg, Failure.ANSWER, "it has no such data-parallel rank")
        judged = self._worker_keys.judged(engine.server.address, answer.status)
        if 400 <= answer.status < 500 and not judged:
            self._pool.succeeded(engine)
            content_type = answer.header(b"content-type") or "application/json"
            if encoding(answer) is not None:
                raise ApiError(answer.status, f"The engine answers {answer.status}.")
            raise Refused(answer.status, content, content_type)
        message = f"it answers {answer.status}"
        raise self.failed(engine, leg, Failure.STATUS, message)
