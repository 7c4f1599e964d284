"""Answers that are too long to be kept: passed on as they come, with back-pressure.

Their end is held back, because what the router tidies in an answer stands there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.http.client.response import EngineResponse, UpstreamError
from kvrouter.http.headers import JSON
from kvrouter.serving.request.headers import answer_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.engine import Engine
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.serving.legs.leg import EngineClient
    from kvrouter.serving.request.context import RequestContext

END_BYTES: Final = 1 << 20


class Onward:
    """Body sink of one such answer, whose head the client has.

    Args:
        exchange: the client's.
        answer: the engine's.
    """

    passer = None  # the engine's chunk frames would have to be cut at the end

    def __init__(self, exchange: Exchange, answer: EngineResponse) -> None:
        self._exchange = exchange
        self._answer = answer
        self._held = bytearray()

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self._exchange.paused

    def write(self, data: bytes) -> None:
        """Take a piece, and pass on what is certainly not the end."""
        self._held += data
        if len(self._held) >= 2 * END_BYTES:
            self._exchange.write(bytes(self._held[:-END_BYTES]))
            del self._held[:-END_BYTES]

    async def run(self, idle_s: float, tidy: Callable[[bytes], bytes]) -> bytes:
        """Pass the body on to its end, which `tidy` changes; returns the end as it came.

        Raises:
            UpstreamError: it broke off, or stopped for `idle_s`; the client's is cut off too.
        """
        self._exchange.throttle = self._answer
        self._exchange.on_close(self._answer.close)  # before another piece comes
        try:
            await self._answer.relay_to(self, idle_s)
        except UpstreamError:
            self._exchange.abort()
            raise
        finally:
            self._exchange.throttle = None
        end = bytes(self._held)
        self._exchange.write(tidy(end))
        self._exchange.end()
        return end


async def pass_on(
    context: RequestContext,
    client: EngineClient,
    engine: Engine,
    answer: EngineResponse,
    tidy: Callable[[bytes], bytes],
) -> bytes:
    """Answer a client with such an answer; returns its end, b"" if it broke off."""
    kind = answer.header(b"content-type") or JSON
    fields = answer_fields(context)
    context.exchange.start(answer.status, [("content-type", kind)], fields=fields, hold=True)
    try:
        return await Onward(context.exchange, answer).run(client.deadlines.idle_s, tidy)
    except UpstreamError as error:
        context.outcome.break_off(str(client.failed(engine, error)))
        return b""
