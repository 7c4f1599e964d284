"""One timer for many deadlines. It calls items that are late; it cancels no task."""

import asyncio
from typing import Protocol

NEVER = float("inf")


class HasDeadline(Protocol):
    """Something with a deadline on the loop's clock; `NEVER` while nothing is awaited."""

    expires_at: float

    def expire(self) -> None:
        """Act on the deadline that has passed; the item must move or clear `expires_at`."""


class DeadlineTimer:
    """Calls `expire()` of every late item, once per tick.

    To move a deadline is to set an attribute, cheap enough to do for every event: a timer handle
    per request and per event would cost more than relaying the event.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tick_s: float) -> None:
        self._loop = loop
        self._tick_s = tick_s
        self._items: set[HasDeadline] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: HasDeadline) -> None:
        """Call `item` when it is late, until it is discarded; runs only while there are items."""
        self._items.add(item)
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def discard(self, item: HasDeadline) -> None:
        """Forget `item`; it may be unknown."""
        self._items.discard(item)

    def close(self) -> None:
        """Stop the timer and forget every item."""
        self._items.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sweep(self, now: float) -> None:
        """Call every item that is late at `now` (seconds, the loop's clock)."""
        for item in [item for item in self._items if item.expires_at <= now]:
            if item in self._items:
                item.expire()

    def _tick(self) -> None:
        self._timer = None
        self.sweep(self._loop.time())
        if self._items and self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)
