"""A streamed answer from an engine to a client, byte for byte, with back-pressure.

Pieces go on from within the read callback, in the engine's own chunk frames where the client speaks
HTTP/1.1; no task wakes for them. It is the seam at which kvcore could take a stream over. Only a
stream that is to be tidied goes on in whole events.
"""

import re
from collections.abc import Callable

from kvrouter._native import Buckets, StreamFeed
from kvrouter.errors import ApiError
from kvrouter.http.answer import Answer, unframed
from kvrouter.http.exchange import Exchange

_FINISH = re.compile(rb'"finish_reason":\s*"([a-z_]{1,32})"')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d{1,12})')
MAX_EVENT_BYTES = 8 << 20
"""What is held at most of an event that has not come whole."""
END_MARK = b"data: [DONE]"
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")

Tidy = Callable[[bytes], bytes]
"""Makes of whole events what the client may see of them."""


class Relay:
    """Sink of one stream.

    Args:
        exchange: the client's.
        answer: the engine's.
        gaps: takes the times between events.
        tidy: changes events; None: bytes go on as they come. An event that has not come whole when
            the stream breaks off is then not passed on at all.
    """

    __slots__ = ("_answer", "_exchange", "_feed", "_held", "_tidy")

    def __init__(
        self, exchange: Exchange, answer: Answer, gaps: Buckets, tidy: Tidy | None = None
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._feed = answer.feed or StreamFeed()
        self._feed.count_into(gaps)
        self._tidy = tidy
        self._held = b""

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
        writer = self._exchange.frame_writer()
        return writer if writer is None or self._tidy is None else self._pass_frames

    def write(self, data: bytes) -> None:
        """Pass on a piece that goes without its frames."""
        if self._answer.feed is None:
            self._feed.note(data)
        if self._tidy is None:
            self._exchange.write(data)
        else:
            self._pass_events(self._tidy, data)

    async def run(self, idle_s: float, *, end: bool = True) -> None:
        """Relay to the end of the answer, which must not stop for longer than `idle_s`.

        Args:
            idle_s: seconds.
            end: whether the client's answer ends with it.

        Raises:
            UpstreamError: the engine's answer broke off; `fail` can tell the client.
        """
        self._exchange.throttle = self._answer
        self._exchange.on_close(self._answer.close)  # before another piece comes
        try:
            await self._answer.relay_to(self, idle_s)
        finally:
            self._exchange.throttle = None
        if self._held and self._tidy is not None:
            self._exchange.write(self._tidy(self._held))
        if end:
            self._exchange.end()

    def ended(self) -> bool:
        """Whether a stream that broke off had said all: then the client's answer ends well here."""
        if not self._feed.tail.rstrip().endswith(END_MARK):
            return False
        if self._held and self._tidy is not None:
            self._exchange.write(self._tidy(self._held))
        self._exchange.end()
        return True

    def fail(self, error: ApiError) -> None:
        """End the stream with an error event, on a line of its own."""
        tail = b"" if self._tidy is not None else self._feed.tail
        lead = b"" if not tail or tail.endswith(b"\n\n") else b"\n\n"
        self._exchange.write(lead + error.frame())
        self._exchange.end()

    def finish_reason(self) -> str:
        """Why generation ended, as the last events say; "unknown" where they do not."""
        return finish_reason(self._feed.tail)

    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, as the last usage says; None where the last events have none."""
        return prompt_tokens(self._feed.tail)

    def _pass_frames(self, frames: bytes) -> None:
        assert self._tidy is not None
        self._pass_events(self._tidy, unframed(frames))

    def _pass_events(self, tidy: Tidy, data: bytes) -> None:
        """Pass on what is whole of the stream so far, and hold the rest."""
        if self._held:
            data = self._held + data
        end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
        if len(data) - end > MAX_EVENT_BYTES:  # no event, whatever it is
            end = len(data)
        self._held = data[end:]
        if end:
            self._exchange.write(tidy(data[:end]))


def finish_reason(tail: bytes) -> str:
    """The last finish reason in the end of a stream; "unknown" where there is none."""
    found = _FINISH.findall(tail)
    return found[-1].decode("ascii") if found else "unknown"


def prompt_tokens(tail: bytes) -> int | None:
    """The last usage's tokens of the prompt in the end of a stream; None where there is none."""
    found = _PROMPT_TOKENS.findall(tail)
    return int(found[-1]) if found else None
