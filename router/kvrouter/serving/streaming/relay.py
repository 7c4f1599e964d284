"""A streamed answer from an engine to a client, with back-pressure.

Pieces go on from within the read callback, in the engine's own chunk frames where the client speaks
HTTP/1.1; no task wakes for them. It is the seam at which kvcore could take a stream over. Only
pieces that have something to tidy, and those that cut an event in two, go on in whole events.
"""

from collections.abc import Callable

from kvrouter._native import Buckets, StreamFeed
from kvrouter.errors import ApiError
from kvrouter.http.client.response import EngineResponse, unframed
from kvrouter.http.server.exchange import Exchange
from kvrouter.openai.response import MARKS, finish_reason, generated_tokens, prompt_tokens
from kvrouter.openai.sse import MAX_EVENT_BYTES, EventBuffer, error_events, is_done

Tidy = Callable[[bytes], bytes]
"""Makes of whole events what the client may see of them."""


class Relay:
    """Sink of one stream.

    An event that has not come whole when the stream breaks off is not passed on at all.

    Args:
        exchange: the client's.
        answer: the engine's.
        gaps: takes the times between events.
        tidy: changes events.
        every: whether it may change any event; else only those with one of `tidy.MARKS`: the
            others go on as they come.
    """

    __slots__ = ("_answer", "_begun", "_buffer", "_every", "_exchange", "_feed", "_tidy", "_whole")

    def __init__(
        self,
        exchange: Exchange,
        answer: EngineResponse,
        gaps: Buckets,
        tidy: Tidy,
        *,
        every: bool = False,
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._feed = answer.feed or StreamFeed()
        self._feed.count_into(gaps)
        if not every:
            self._feed.watch(*MARKS)
        self._tidy = tidy
        self._every = every
        self._begun = False
        self._buffer = EventBuffer()
        self._whole = False

    @property
    def events(self) -> int:
        """Server-sent events passed on so far, without the end mark."""
        return self._feed.events

    @property
    def generated(self) -> int:
        """Tokens passed on so far: as usage tells, else one for each event."""
        return generated_tokens(self._feed.tail, self._feed.events, whole=self._whole)

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self._exchange.paused

    @property
    def passer(self) -> Callable[[bytes], None] | None:
        """Takes chunk frames as they came from the engine, where the client takes them.

        The first piece came before its marks were watched for, so it is looked at here.
        """
        writer = self._exchange.frame_writer()
        untouched = writer is None or (self._begun and not self._every)
        return writer if untouched else self._pass_frames

    def write(self, data: bytes) -> None:
        """Pass on a piece that goes without its frames."""
        if self._answer.feed is None:
            self._feed.note(data)
        self._pass_events(data)

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
        self._finish(end=end)

    def ended(self) -> bool:
        """Whether a stream that broke off had said all: then the client's answer ends well here."""
        if not is_done(self._feed.tail):
            return False
        self._finish(end=True)
        return True

    def fail(self, error: ApiError) -> None:
        """End the stream with an error event."""
        self._exchange.write(error_events(error))
        self._exchange.end()

    def finish_reason(self) -> str:
        """Why generation ended, as the last events say; "unknown" where they do not."""
        return finish_reason(self._feed.tail)

    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, as the last usage says; None where the last events have none."""
        return prompt_tokens(self._feed.tail)

    def _finish(self, *, end: bool) -> None:
        self._whole = True
        if rest := self._buffer.rest():
            self._exchange.write(self._tidy(rest))
        if end:
            self._exchange.end()

    def _pass_frames(self, frames: bytes) -> None:
        self._pass_events(unframed(frames))

    def _pass_events(self, data: bytes) -> None:
        """Pass on what is whole of the stream so far, and hold the rest."""
        self._begun = True
        events = self._buffer.take(data)
        if len(self._buffer) > MAX_EVENT_BYTES:  # no event, whatever it is
            events += self._buffer.rest()
        if events:
            self._exchange.write(self._tidy(events))
