"""A streamed answer on its way from an engine to a client, with back-pressure.

Pieces go on from within the read callback, in the engine's own chunk frames if the client speaks
HTTP/1.1; no task wakes for them. Only pieces that have something to tidy, and those that cut an
event in two, go on as whole events.
"""

from collections.abc import Callable

from kvrouter._native import Buckets
from kvrouter.errors import ApiError, names_events
from kvrouter.http.client.response import EngineResponse
from kvrouter.http.headers import unchunk
from kvrouter.http.server.exchange import Exchange
from kvrouter.openai.response import (
    CONTENT,
    MARKS,
    PromptUsage,
    finish_reason,
    generated_tokens,
    prompt_usage,
)
from kvrouter.openai.sse import MAX_EVENT_BYTES, EventBuffer, error_events

Tidy = Callable[[bytes], bytes]
"""Makes of whole events what the client may see of them."""


class Relay:
    """Body sink of one stream. An event that is not whole when the stream breaks off is dropped.

    Args:
        exchange: the client's.
        answer: the engine's.
        gaps: takes the times between events.
        tidy: changes events.
        every: whether it may change any event; else only those with one of `MARKS`: the others go
            on as they come.
        content: called when the answer has content: at once, or with the first event that has some
            where events have names. `gaps` takes no time before.
    """

    __slots__ = (
        *("_answer", "_begun", "_buffer", "_content", "_every", "_exchange", "_feed"),
        *("_gaps", "_split", "_tidy", "_whole"),
    )

    def __init__(
        self,
        exchange: Exchange,
        answer: EngineResponse,
        gaps: Buckets,
        tidy: Tidy,
        *,
        every: bool = False,
        content: Callable[[], object] | None = None,
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        assert answer.feed is not None  # it has begun
        self._feed = answer.feed
        self._gaps, self._content = gaps, content
        self._tidy = tidy
        self._every = every
        if content is not None and names_events(exchange.path):
            self._feed.watch(b"data:")
        else:
            self._begin()
        self._begun = False
        self._buffer = EventBuffer()
        self._whole = False
        self._split = False

    @property
    def events(self) -> int:
        """Server-sent events passed on so far, without the end mark."""
        return self._feed.events

    @property
    def last_s(self) -> float:
        """When a piece came last, on the monotonic clock."""
        return self._feed.last_s

    @property
    def between_events(self) -> bool:
        """Whether what was passed on ends between two events: always, but for overlong ones."""
        return not self._split or self._feed.between_events

    @property
    def generated(self) -> int:
        """Tokens passed on so far: by usage, else one for each event."""
        return generated_tokens(self._feed.tail, self._feed.events, whole=self._whole)

    @property
    def finish_reason(self) -> str:
        """Why generation ended, by the last events; "unknown" if they do not say."""
        return finish_reason(self._feed.tail)

    @property
    def prompt_usage(self) -> PromptUsage:
        """What the last usage says of the prompt."""
        return prompt_usage(self._feed.tail)

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self._exchange.paused

    @property
    def passer(self) -> Callable[[bytes], None] | None:
        """Takes chunk frames as they came from the engine, if the client takes them.

        The first piece came before its marks were watched for, so it is looked at here.
        """
        writer = self._exchange.frame_writer()
        untouched = writer is None or (self._begun and not self._every)
        return writer if untouched else self._pass_frames

    def write(self, data: bytes) -> None:
        """Pass on a piece that goes without its frames."""
        self._pass_events(data)

    async def run(self, idle_s: float, *, end: bool = True) -> None:
        """Relay to the end of the answer, which must not stop for longer than `idle_s` seconds.

        With `end` the client's answer ends with it.

        Raises:
            UpstreamError: the engine's answer broke off; `fail` can say so to the client.
        """
        self._exchange.throttle = self._answer
        self._exchange.on_close(self._answer.close)  # before another piece comes
        try:
            await self._answer.relay_to(self, idle_s)
            self._begin()  # also without content
        finally:
            self._exchange.throttle = self._content = None
        self._finish(end=end)

    def finish_if_done(self) -> bool:
        """End the client's answer well if the stream broke off after its end mark."""
        if self._feed.done:
            self._finish(end=True)
        return self._feed.done

    def fail(self, error: ApiError) -> None:
        """End the stream with an error event."""
        self._exchange.write(error_events(error, self._exchange.path, self.events))
        self._exchange.end()

    def _finish(self, *, end: bool) -> None:
        self._whole = True
        if rest := self._buffer.rest():
            self._exchange.write(self._tidy(rest))
        if end:
            self._exchange.end()

    def _pass_frames(self, frames: bytes) -> None:
        self._pass_events(unchunk(frames))

    def _pass_events(self, data: bytes) -> None:
        """Pass on what is whole of the stream so far, and hold the rest."""
        self._begun = True
        events = self._buffer.take(data)
        if len(self._buffer) > MAX_EVENT_BYTES:  # no event, whatever it is
            events += self._buffer.rest()
            self._split = True
        if events:
            if self._content is not None and CONTENT.search(events):
                self._begin()
            self._exchange.write(self._tidy(events))

    def _begin(self) -> None:
        """There is content: tell it once, count gaps, look only for what may have to be tidied."""
        content, self._content = self._content, None
        self._feed.count_into(self._gaps)
        if not self._every:
            self._feed.watch(*MARKS)
        if content is not None:
            content()
