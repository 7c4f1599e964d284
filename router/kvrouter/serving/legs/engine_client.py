"""Asks engines over kept connections, and reports to the pool how they did.

It never chooses an engine and never tries another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Engine, Role
from kvrouter.http.client.pool import (
    ConnectionPool,
    Deadlines,
    EngineResponse,
    OpenConnections,
    UpstreamError,
)
from kvrouter.http.failure import Failure
from kvrouter.openai.response import is_json
from kvrouter.serving.legs.failures import LegFailed
from kvrouter.serving.legs.judge import Judge
from kvrouter.serving.legs.verdict import look
from kvrouter.serving.request.forwarded_headers import without_rank

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvrouter.credentials.tls import Trust
    from kvrouter.http.deadlines import DeadlineTimer

MAX_ANSWER_BYTES: Final = 64 << 20
"""Of answers that must be whole."""
KEPT_BYTES: Final = 8 << 20
"""Of other answers, until which another engine can still answer; more is passed on as it comes."""
_LOOKED_BYTES: Final = 4096
_EVENT_BYTES: Final = 64 << 10
_CALL_DEADLINES: Final = Deadlines(connect_s=2.0, first_byte_s=5.0, idle_s=5.0)
"""Of calls that are no legs."""
_POST_FIELDS: Final = b"content-type: application/json\r\n"


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

    async def call(
        self,
        engine: Engine,
        path: str,
        body: bytes,
        fields: bytes = _POST_FIELDS,
        deadlines: Deadlines = _CALL_DEADLINES,
    ) -> tuple[int, bytes]:
        """Status and body of the answer to a request that is no client's, within seconds.

        Raises OSError if no answer came.
        """
        try:
            answer = await self.send(engine, path, fields, body, deadlines)
            return answer.status, await answer.read(KEPT_BYTES, deadlines.idle_s)
        except UpstreamError as error:
            raise OSError(str(error)) from None

    async def post(self, engine: Engine, path: str, body: bytes, deadline_s: float) -> bytes:
        """The body of a 200, else as `call`; raises ValueError for any other status."""
        deadlines = Deadlines(deadline_s, deadline_s, deadline_s)
        status, content = await self.call(engine, path, body, deadlines=deadlines)
        if status != 200:
            raise ValueError(f"{path} answers {status}")
        return content

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
        connections = self._connections.get(engine)
        if connections is None:
            connections = self._connections[engine] = ConnectionPool(
                engine.host,
                engine.port,
                self.timer,
                open_connections=self.connections(engine),
                tls=self.trust.context if engine.server.tls else None,
            )
        method = "POST" if body else "GET"
        return connections.send(
            method, path, fields=fields, body=(body,), deadlines=deadlines, once=once
        )
