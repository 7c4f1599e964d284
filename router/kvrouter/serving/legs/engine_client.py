"""Asks engines over kept connections, and reports to the pool how they did.

It never chooses an engine and never tries another one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Engine, Role
from kvrouter.errors import ApiError
from kvrouter.http.client.pool import (
    ConnectionPool,
    Deadlines,
    EngineResponse,
    OpenConnections,
    UpstreamError,
)
from kvrouter.http.failure import Failure
from kvrouter.serving.legs.retries import EngineFull, LegFailed, Refused
from kvrouter.serving.request.forwarded_headers import without_rank

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvrouter.credentials.engine_keys import WorkerKeys
    from kvrouter.credentials.tls import Trust
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.deadlines import DeadlineTimer
    from kvrouter.telemetry.metrics import Metrics

MAX_ANSWER_BYTES: Final = 64 << 20
MAX_ERROR_BYTES: Final = 1 << 20
_NO_RANK: Final = re.compile(rb"(?:data_parallel_rank \d+ is|routed_dp_rank=\d+) out of range")
"""How vLLM and SGLang refuse a rank (input_processor.py; managers/tokenizer_manager.py)."""
_CALL_DEADLINES: Final = Deadlines(connect_s=2.0, first_byte_s=5.0, idle_s=5.0)
"""Of calls that are no legs."""
_POST_FIELDS: Final = b"content-type: application/json\r\n"


def encoding(answer: EngineResponse) -> str | None:
    """The coding of an answer's body, if it has one although none was asked for."""
    coding = answer.header(b"content-encoding")
    return None if coding is None or coding.lower() == "identity" else coding[:40]


def check_plain(answer: EngineResponse) -> None:
    """Raise UpstreamError, and close the answer, if its body is encoded."""
    coding = encoding(answer)
    if coding is not None:
        answer.close()
        raise UpstreamError(Failure.ANSWER, f"its answer is encoded ({coding}), unasked")


def check_begun(answer: EngineResponse) -> None:
    """Raise UpstreamError if a stream has ended without an event."""
    if answer.complete and not answer.begun:
        raise UpstreamError(Failure.ANSWER, "a stream without an event")


def _is_json(body: bytes) -> bool:
    """Whether `body` can be an answer of OpenAI's API, by its first and last character alone."""
    body = body.strip()
    return body[:1] + body[-1:] in (b"{}", b"[]")


@dataclass(eq=False, slots=True, kw_only=True)
class EngineClient:
    """Owns the connections to all engines; `close` ends those that are idle."""

    pool: EnginePool  # counts failures and successes of engines
    timer: DeadlineTimer  # checks deadlines
    deadlines: Deadlines  # of every leg
    metrics: Metrics  # counts failures
    worker_keys: WorkerKeys  # keys that engines get
    trust: Trust  # certificates to trust for engines that are reached by HTTPS
    _connections: dict[Engine, ConnectionPool] = field(default_factory=dict, init=False)
    _open: dict[Engine, OpenConnections] = field(default_factory=dict, init=False)

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
            answer = await self._send(engine, path, fields, body, deadlines)
            if answer.status == 200:
                check_plain(answer)
                return answer
            content = await answer.read(MAX_ERROR_BYTES, deadlines.idle_s)
        except UpstreamError as error:
            raise self.failed(engine, error, leg) from None
        if answer.status == 429:
            raise self._full(engine, leg)
        if engine.rank is not None and _NO_RANK.search(content):
            self.pool.leave(
                engine, "changed"
            )  # it has fewer ranks than it said: it is detected again
            no_rank = UpstreamError(Failure.ANSWER, "it has no such data-parallel rank")
            raise self.failed(engine, no_rank, leg)
        judged = self.worker_keys.judged(engine.server.address, answer.status)
        if 400 <= answer.status < 500 and not judged:
            self.pool.succeeded(engine)
            if encoding(answer) is not None:
                raise ApiError(answer.status, f"The engine answers {answer.status}.")
            content_type = answer.header(b"content-type") or "application/json"
            raise Refused(answer.status, content, content_type, leg)
        bad_status = UpstreamError(Failure.STATUS, f"it answers {answer.status}")
        raise self.failed(engine, bad_status, leg)

    async def read(
        self, engine: Engine, answer: EngineResponse, *, any_kind: bool = False
    ) -> bytes:
        """The body of an answer. Raises LegFailed, for a 200 without JSON too unless `any_kind`."""
        body = answer.whole(MAX_ANSWER_BYTES)
        try:
            if body is None:
                body = await answer.read(MAX_ANSWER_BYTES, self.deadlines.idle_s)
            if answer.status == 200 and not (any_kind or _is_json(body)):
                raise UpstreamError(Failure.ANSWER, f"its answer is no JSON: {body[:40]!r}")
        except UpstreamError as error:
            raise self.failed(engine, error) from None
        return body

    async def forward(
        self, engine: Engine, path: str, fields: bytes, body: bytes, *, as_it_is: bool = False
    ) -> EngineResponse:
        """The engine's answer to a request that is no leg, also if the engine refuses it.

        With `as_it_is` an answer of any status: it says nothing about the engine.

        The caller must take the answer to its end or close it, and report success to the pool.

        Raises:
            LegFailed: no answer came, or one that is about the engine and not about the request.
        """
        try:
            answer = await self._send(engine, path, fields, body, self.deadlines)
            status = answer.status
            if status == 200:
                check_plain(answer)
            if as_it_is:
                return answer
            ours = self.worker_keys.judged(engine.server.address, status)
            if status == 501 or (status < 500 and status != 429 and not ours):
                return answer
            await answer.read(MAX_ERROR_BYTES, self.deadlines.idle_s)
            if status == 429:
                raise self._full(engine, Role.DECODE)
            raise UpstreamError(Failure.STATUS, f"it answers {status}")
        except UpstreamError as error:
            raise self.failed(engine, error) from None

    async def call(
        self, engine: Engine, path: str, body: bytes, fields: bytes = _POST_FIELDS
    ) -> tuple[int, bytes]:
        """Status and body of the answer to a POST that serves no client, within seconds.

        Raises OSError if no answer came.
        """
        try:
            answer = await self._send(engine, path, fields, body, _CALL_DEADLINES)
            return answer.status, await answer.read(MAX_ANSWER_BYTES, _CALL_DEADLINES.idle_s)
        except UpstreamError as error:
            raise OSError(str(error)) from None

    async def post(self, engine: Engine, path: str, body: bytes) -> bytes:
        """The body of a 200, else as `call`; raises ValueError for any other status."""
        status, content = await self.call(engine, path, body)
        if status != 200:
            raise ValueError(f"{path} answers {status}")
        return content

    def failed(self, engine: Engine, error: UpstreamError, leg: Role = Role.DECODE) -> LegFailed:
        """Count a failed leg and report it to the pool; returns the error to raise."""
        self.metrics.upstream_errors[leg.value, error.failure.value] += 1
        self.pool.failed(engine, error.failure)
        return LegFailed(engine, error.failure, str(error))

    def engine_left(self, engine: Engine) -> None:
        """Close its idle connections; those in use end with their legs."""
        connections = self._connections.pop(engine, None)
        if connections is not None:
            connections.close()

    def forget(self, engine: Engine) -> None:
        """`engine` is removed for good; legs that still run on it break off."""
        self.engine_left(engine)
        connections = self._open.pop(engine, None)
        if connections is not None and engine.requests:
            connections.cut(Failure.BROKEN, "the engine was removed")

    def connections(self, engine: Engine) -> OpenConnections:
        """All connections to `engine`."""
        return self._open.setdefault(engine, OpenConnections())

    def engine_joined(self, engine: Engine) -> None:
        """It is reached again if it was cut off."""
        if self.connections(engine).cut_off:
            self.engine_left(engine)
            del self._open[engine]

    def close(self) -> None:
        """Close every idle connection."""
        for engine in list(self._connections):
            self.engine_left(engine)

    def _full(self, engine: Engine, leg: Role) -> EngineFull:
        self.metrics.upstream_errors[leg.value, "full"] += 1
        return EngineFull(engine)

    def _send(
        self, engine: Engine, path: str, fields: bytes, body: bytes, deadlines: Deadlines
    ) -> Awaitable[EngineResponse]:
        """POST to the engine's rank, with the engine's key."""
        if engine.rank_line:
            fields = without_rank(fields) + engine.rank_line
        fields = self.worker_keys.shown(engine.server.address, fields)
        connections = self._connections.get(engine)
        if connections is None:
            connections = self._connections[engine] = ConnectionPool(
                engine.host,
                engine.port,
                self.timer,
                open_connections=self.connections(engine),
                tls=self.trust.context if engine.server.tls else None,
            )
        return connections.send("POST", path, fields=fields, body=(body,), deadlines=deadlines)
