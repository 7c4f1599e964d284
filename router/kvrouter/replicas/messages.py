"""What routers tell each other: msgpack of known shape and bounded size; no state.

An envelope is one message of a channel: who sent it, and what, in the order in which it happened.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

VERSION: Final = 1
MAX_ENVELOPE_BYTES: Final = 256 << 10
"""An envelope that has reached it is closed; one item may go beyond."""
MAX_RECEIVED_BYTES: Final = 2 << 20
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
    """What an administrator said of an engine.

    Attributes:
        address: HOST:PORT.
        action: the role that it was given, or how it was removed.
        stamp: of two changes of one engine the larger one counts.
        by: the router that was told; decides between equal stamps.
    """

    address: Address
    action: Action
    stamp: Number
    by: RouterId


class State(msgspec.Struct, tag="s", frozen=True, array_like=True):
    """What a router is and has under way; each replaces the one before.

    Attributes:
        name: for people.
        epoch: another number than before: events that it had to tell were lost on the way.
        load: tokens under way from this router, by engine or rank; others have none.
        changes: what administrators said, as far as it knows; None where nothing is new.
    """

    name: Annotated[str, msgspec.Meta(max_length=300)]
    epoch: Number
    load: Annotated[dict[Address, Tokens], msgspec.Meta(max_length=MAX_ADDRESSES)]
    changes: Annotated[list[Change], msgspec.Meta(max_length=MAX_CHANGES)] | None = None


class Guess(msgspec.Struct, tag="g", frozen=True, array_like=True, gc=False):
    """Blocks that an engine which tells nothing has, since the sender sent them there."""

    address: Address
    domain: Domain
    ids: Ids


class Ask(msgspec.Struct, tag="a", frozen=True, array_like=True, gc=False):
    """The sender wants to know what engines hold, as far as the receiver knows."""


Item = State | Guess | Ask


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One message of a channel.

    Attributes:
        version: of what follows; of another one nothing is understood.
        sender: who it is from.
        number: grows by one with each envelope that the sender tells everybody; else 0.
        items: oldest first.
    """

    version: int
    sender: RouterId
    number: Number
    items: list[Item]


class _Opened(msgspec.Struct, frozen=True, array_like=True):
    version: int


class BadEnvelope(ValueError):
    """Bytes that are no envelope of this version; says why in a word: "malformed", "version"."""


_encoder: Final = msgspec.msgpack.Encoder()
_envelopes: Final = msgspec.msgpack.Decoder(Envelope)
_versions: Final = msgspec.msgpack.Decoder(_Opened)


def encode(envelope: Envelope) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(envelope)


def decode(message: bytes) -> Envelope:
    """The envelope that these bytes are.

    Raises:
        BadEnvelope: they are none.
    """
    if len(message) > MAX_RECEIVED_BYTES:
        raise BadEnvelope("malformed")
    try:
        if _versions.decode(message).version != VERSION:
            raise BadEnvelope("version")
        return _envelopes.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadEnvelope("malformed") from None


def cost(item: Item) -> int:
    """About how many bytes the item is in memory and in an envelope."""
    if isinstance(item, Guess):
        return 64 + len(item.ids)
    if isinstance(item, State):
        return 64 + 40 * len(item.load) + 80 * len(item.changes or ())
    return 64
