"""What is still to be told to the other routers: bounded, in order, made into envelopes."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvrouter.replicas.messages import (
    MAX_ENVELOPE_BYTES,
    VERSION,
    Envelope,
    State,
    cost,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.replicas.messages import Item

MAX_QUEUED_BYTES: Final = 8 << 20
"""Beyond it the oldest are dropped, and the others ask for all of it anew."""
MAX_TURN_BYTES: Final = 1 << 20
"""Told in one turn, so that the loop gets its own."""


class Letter(NamedTuple):
    """An envelope that is ready: its channel and its bytes."""

    channel: str
    content: bytes


class _Queued(NamedTuple):
    channel: str
    item: Item
    bytes: int


class Outbox:
    """A queue of items, each for a channel.

    Args:
        sender: id of this router.
        everybody: the channel whose envelopes are numbered.
        max_bytes: bound of what is queued.

    Attributes:
        number: of the last envelope for everybody.
        epoch: grows when something was dropped or may not have arrived.
        counts: dropped_items, envelopes, bytes: each only grows.
    """

    def __init__(self, sender: str, everybody: str, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._sender = sender
        self._everybody = everybody
        self._max_bytes = max_bytes
        self._queued: deque[_Queued] = deque()
        self._bytes = 0
        self.number = 0
        self.epoch = 0
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._queued)

    @property
    def room(self) -> bool:
        """Whether there is much room: what can wait, waits until then."""
        return self._bytes < self._max_bytes // 4

    def put(self, channel: str, item: Item) -> None:
        """Queue `item`; the oldest are dropped where there is no room for it."""
        size = cost(item)
        self._queued.append(_Queued(channel, item, size))
        self._bytes += size
        if self._bytes > self._max_bytes:
            while self._bytes > self._max_bytes and self._queued:
                self._bytes -= self._queued.popleft().bytes
                self.counts["dropped_items"] += 1
            self.epoch += 1

    def letters(self) -> Iterator[Letter]:
        """Take what may be told in one turn, in order, as envelopes."""
        told = 0
        while self._queued and told < MAX_TURN_BYTES:
            channel, items, size = self._queued[0].channel, [], 0
            while self._queued and self._queued[0].channel == channel and size < MAX_ENVELOPE_BYTES:
                item = self._queued.popleft()
                items.append(item.item)
                size += item.bytes
            self._bytes -= size
            told += size
            public = channel == self._everybody
            self.number += public
            number = self.number if public else 0
            content = encode(Envelope(VERSION, self._sender, number, items))
            self.counts["envelopes"] += 1
            self.counts["bytes"] += len(content)
            yield Letter(channel, content)

    def lost(self) -> None:
        """What was taken last may not have arrived, and what waits is old: drop it all."""
        self.counts["dropped_items"] += sum(not isinstance(q.item, State) for q in self._queued)
        self._queued.clear()
        self._bytes = 0
        self.epoch += 1
