"""Messages between routers: msgpack of known shape and bounded size, and the queue of our own.

An envelope is one message of a channel: its sender, and items in the order in which they happened.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec

from kvrouter._native import msgpack_within

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION: Final = 1
MAX_ENVELOPE_BYTES: Final = 256 << 10
"""An envelope of this size takes no further item; its last item may exceed it."""
MAX_QUEUED_BYTES: Final = 8 << 20
"""Beyond it the oldest items are dropped, and the other routers ask for a snapshot."""
MAX_TURN_BYTES: Final = 1 << 20
"""Packed in one turn, so that it does not block the event loop for long."""
MAX_RECEIVED_BYTES: Final = 2 << 20
MAX_VALUES: Final = 1 << 16
"""More than the largest state has, or an envelope full of the smallest items."""
MAX_ADDRESSES: Final = 4096
MAX_CHANGES: Final = 1024
MAX_PIECE_BLOCKS: Final = 8192

Address = Annotated[str, msgspec.Meta(min_length=3, max_length=300)]
RouterId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Ids = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PIECE_BLOCKS)]
Action = Literal["prefill", "decode", "both", "drain", "cut"]


class Domain(msgspec.Struct, frozen=True, array_like=True):
    """What gives block ids their meaning: tokens per block, and the first bytes of the root."""

    block_tokens: Number
    root: Annotated[bytes, msgspec.Meta(max_length=8)]


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A change of an engine by an operator."""

    address: Address  # HOST:PORT
    action: Action  # the role of the added engine, or how it was removed
    stamp: Number  # of two changes of one engine the larger stamp wins
    by: RouterId  # the router that took the change; decides between equal stamps


class State(msgspec.Struct, tag="s", frozen=True, array_like=True):
    """The state of a router; each replaces the one before."""

    name: Annotated[str, msgspec.Meta(max_length=300)]  # for people
    epoch: Number  # a new number means that messages of this router were lost
    # Its tokens in flight by engine or rank; those left out have none.
    load: Annotated[dict[Address, Tokens], msgspec.Meta(max_length=MAX_ADDRESSES)]
    # All changes that it knows; None if nothing is new.
    changes: Annotated[list[Change], msgspec.Meta(max_length=MAX_CHANGES)] | None = None
    # Legs, tokens and estimated milliseconds of its prefill legs, in the same way.
    prefills: Annotated[
        dict[Address, tuple[Tokens, Tokens, Tokens]], msgspec.Meta(max_length=MAX_ADDRESSES)
    ] = {}


class Guess(msgspec.Struct, tag="g", frozen=True, array_like=True, gc=False):
    """Blocks that an engine without KV events should hold, because the sender sent them there."""

    address: Address
    domain: Domain
    ids: Ids


class SnapshotRequest(msgspec.Struct, tag="a", frozen=True, array_like=True, gc=False):
    """The sender asks for all guesses of the receiver."""


Item = State | Guess | SnapshotRequest


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One message of a channel."""

    version: int  # of the format of the rest
    sender: RouterId  # id of a router
    number: Number  # counts the sender's envelopes to all routers; 0 in one to a single router
    items: list[Item]  # oldest first


class _Versioned(msgspec.Struct, frozen=True, array_like=True):
    version: int


class BadEnvelope(ValueError):
    """Bytes that are no envelope of this version; its text is "malformed" or "version"."""


_encoder: Final = msgspec.msgpack.Encoder()
_envelopes: Final = msgspec.msgpack.Decoder(Envelope)
_versions: Final = msgspec.msgpack.Decoder(_Versioned)


def encode(envelope: Envelope) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(envelope)


def decode(message: bytes) -> Envelope:
    """The envelope in these bytes. BadEnvelope: they are malformed, or of another version."""
    if len(message) > MAX_RECEIVED_BYTES:
        raise BadEnvelope("malformed")
    try:
        if not msgpack_within(message, MAX_VALUES):
            raise BadEnvelope("malformed")
        if _versions.decode(message).version != VERSION:
            raise BadEnvelope("version")
        return _envelopes.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadEnvelope("malformed") from None


def cost(item: Item) -> int:
    """About the bytes of the item, in memory and in an envelope."""
    if isinstance(item, Guess):
        return 64 + len(item.ids)
    if isinstance(item, State):
        return 64 + 40 * (len(item.load) + len(item.prefills)) + 80 * len(item.changes or ())
    return 64


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
