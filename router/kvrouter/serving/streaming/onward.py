"""Answers that are too long to be kept: passed on as they come, with back-pressure.

Their end is held back, because what the router tidies in an answer stands there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.http.client.response import EngineResponse, UpstreamError
from kvrouter.http.headers import JSON
from kvrouter.serving.request.context import answer_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.engine import Engine
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.serving.legs.leg import EngineClient
    from kvrouter.serving.request.context import RequestContext

END_BYTES: Final = 1 << 20


class Onward:
    """Body sink of one such answer, whose head the client has; `held` is its end so far."""

    passer = None  # the engine's chunk frames would have to be cut at the end

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.held = bytearray()

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self._exchange.paused

    def write(self, data: bytes) -> None:
        """Take a piece, and pass on what is certainly not the end."""
        self.held += data
        if len(self.held) >= 2 * END_BYTES:
            self._exchange.write(bytes(self.held[:-END_BYTES]))
            del self.held[:-END_BYTES]


async def pass_on(
    context: RequestContext,
    client: EngineClient,
    engine: Engine,
    answer: EngineResponse,
    tidy: Callable[[bytes], bytes],
) -> bytes:
    """Answer a client with such an answer, whose end `tidy` changes; returns the end as it came.

    b"" if it broke off, or stopped for too long: the client's is cut off too.
    """
    exchange, kind = context.exchange, answer.header(b"content-type") or JSON
    fields = answer_fields(context)
    exchange.start(answer.status, [("content-type", kind)], fields=fields, hold=True)
    sink, exchange.throttle = Onward(exchange), answer
    exchange.on_close(answer.close)  # before another piece comes
    try:
        await answer.relay_to(sink, client.deadlines.idle_s)
    except UpstreamError as error:
        exchange.abort()
        context.outcome.break_off(str(client.failed(engine, error)))
        return b""
    finally:
        exchange.throttle = None
    end = bytes(sink.held)
    exchange.write(tidy(end))
    exchange.end()
    return end
