"""Items for the other routers: a bounded queue, packed into envelopes in order."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from kvrouter.replicas.messages import (
    MAX_ENVELOPE_BYTES,
    VERSION,
    Envelope,
    Item,
    State,
    cost,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_QUEUED_BYTES: Final = 8 << 20
"""Beyond it the oldest items are dropped, and the other routers ask for a snapshot."""
MAX_TURN_BYTES: Final = 1 << 20
"""Packed in one turn, so that it does not block the event loop for long."""


class _Queued(NamedTuple):
    channel: str
    item: Item
    bytes: int


@dataclass(eq=False)
class Outbox:
    """A queue of at most `max_bytes`; each item has a channel, as that to `all_routers`."""

    sender: str
    all_routers: str
    max_bytes: int = MAX_QUEUED_BYTES
    number: int = field(default=0, init=False)  # of the last envelope to all, which alone have one
    epoch: int = field(default=0, init=False)  # grows when items were dropped or may not have come
    # dropped_items, envelopes, bytes; each only grows
    counts: Counter[str] = field(default_factory=Counter, init=False)
    _queued: deque[_Queued] = field(default_factory=deque, init=False)
    _bytes: int = field(default=0, init=False)

    @property
    def room(self) -> bool:
        """Whether three quarters of the queue are free: items that can wait, wait until then."""
        return self._bytes < self.max_bytes // 4

    def put(self, channel: str, item: Item) -> None:
        """Queue `item`; the oldest are dropped if there is no room."""
        size = cost(item)
        self._queued.append(_Queued(channel, item, size))
        self._bytes += size
        if self._bytes > self.max_bytes:
            while self._bytes > self.max_bytes and self._queued:
                self._bytes -= self._queued.popleft().bytes
                self.counts["dropped_items"] += 1
            self.epoch += 1

    def messages(self) -> Iterator[tuple[str, bytes]]:
        """Take the items of one turn, in order, as channels with their encoded envelopes."""
        taken = 0
        while self._queued and taken < MAX_TURN_BYTES:
            channel, items, size = self._queued[0].channel, [], 0
            while self._queued and self._queued[0].channel == channel and size < MAX_ENVELOPE_BYTES:
                item = self._queued.popleft()
                items.append(item.item)
                size += item.bytes
            self._bytes -= size
            taken += size
            public = channel == self.all_routers
            self.number += public
            number = self.number if public else 0
            content = encode(Envelope(VERSION, self.sender, number, items))
            self.counts["envelopes"] += 1
            self.counts["bytes"] += len(content)
            yield channel, content

    def lost(self) -> None:
        """The last messages may not have arrived: drop the queue, whose items are old."""
        self.counts["dropped_items"] += sum(not isinstance(q.item, State) for q in self._queued)
        self._queued.clear()
        self._bytes = 0
        self.epoch += 1
