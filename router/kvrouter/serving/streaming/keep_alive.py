"""Comments to streaming clients that have got nothing for a while, so that nobody cuts them off.

Load balancers close connections that are silent for a minute, as in a queue or a long prefill. What
went to a client is asked of its stream when that may be too long ago: an event costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.serving.streaming.relay import pass_comments

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.serving.request.context import RequestContext

COMMENT: Final = b": keep-alive\n\n"
AT_ONCE: Final = 1000
"""Streams that are looked at in one tick; so that running streams do not wait for them."""


@dataclass(eq=False)
class KeepAlive:
    """Looks at streams that may be silent at each tick of a `DeadlineTimer`."""

    interval_s: float  # of silence after which a comment goes out; 0: none does; may change
    clock: Callable[[], float] = monotonic
    expires_at: float = 0.0  # see HasDeadline: at every tick

    def __post_init__(self) -> None:
        # Requests of streams, each with the time to look at it again, on the monotonic clock; who
        # adds one removes it when it has ended.
        self.streams: dict[RequestContext, float] = {}

    def expire(self) -> None:
        """Send what is due."""
        if not self.interval_s:
            return
        now_s = self.clock()
        due = [context for context, look_s in self.streams.items() if look_s <= now_s]
        for context in due[:AT_ONCE]:
            self.streams[context] = self._look(context, now_s) + self.interval_s

    def _look(self, context: RequestContext, now_s: float) -> float:
        """When a client got something last; now, if it was due or cannot be done now."""
        parts = context.shares or (context,)
        streams = [part.stream for part in parts if part.stream is not None]
        times = [context.timing.started_s, context.commented_s, *(each.last_s for each in streams)]
        if (last_s := max(times)) + self.interval_s > now_s:
            return last_s
        exchange, endpoint = context.exchange, context.endpoint
        open_to = exchange.started or endpoint is None or endpoint.generates
        if open_to and not exchange.ended and all(each.between_events for each in streams):
            pass_comments(context, COMMENT)
        return now_s
