"""A streamed answer from an engine to a client, byte for byte, with back-pressure.

Pieces go on from within the read callback, in the engine's own chunk frames where the client speaks
HTTP/1.1; no task wakes for them. It is the seam at which kvcore could take a stream over.
"""

import re
from collections.abc import Callable

from kvrouter._native import GapCounts, StreamFeed
from kvrouter.errors import ApiError
from kvrouter.http.answer import Answer
from kvrouter.http.exchange import Exchange

_FINISH = re.compile(rb'"finish_reason":\s*"([a-z_]{1,32})"')


class Relay:
    """Sink of one stream."""

    __slots__ = ("_answer", "_exchange", "_feed")

    def __init__(self, exchange: Exchange, answer: Answer, gaps: GapCounts) -> None:
        self._exchange = exchange
        self._answer = answer
        self._feed = answer.feed or StreamFeed()
        self._feed.count_into(gaps)

    @property
    def events(self) -> int:
        """Server-sent events passed on so far, without the end mark."""
        return self._feed.events

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self._exchange.paused

    @property
    def passer(self) -> Callable[[bytes], None] | None:
        """Takes chunk frames as they came from the engine, where the client takes them."""
        return self._exchange.frame_writer()

    def write(self, data: bytes) -> None:
        """Pass on a piece that goes without its frames."""
        if self._answer.feed is None:
            self._feed.note(data)
        self._exchange.write(data)

    async def run(self, idle_s: float) -> None:
        """Relay to the end of the answer, which must not stop for longer than `idle_s`.

        Raises:
            UpstreamError: the engine's answer broke off; `fail` can tell the client.
        """
        self._exchange.throttle = self._answer
        self._exchange.on_close(self._answer.close)  # before another piece comes
        try:
            await self._answer.relay_to(self, idle_s)
        finally:
            self._exchange.throttle = None
        self._exchange.end()

    def fail(self, error: ApiError) -> None:
        """End the stream with an error event, on a line of its own."""
        tail = self._feed.tail
        lead = b"" if not tail or tail.endswith(b"\n\n") else b"\n\n"
        self._exchange.write(lead + error.frame())
        self._exchange.end()

    def finish_reason(self) -> str:
        """Why generation ended, as the last events say; "unknown" where they do not."""
        found = _FINISH.findall(self._feed.tail)
        return found[-1].decode("ascii") if found else "unknown"
