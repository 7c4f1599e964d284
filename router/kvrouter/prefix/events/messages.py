"""The KV events of vLLM and SGLang as messages: decoding only, no state.

Source: vllm/distributed/kv_events.py of vLLM 0.32 (map-encoded events) and its versions before
(array-encoded ones). A message is three frames: topic, sequence number (8 bytes big-endian), and
msgpack `[ts, [event...], data_parallel_rank]`. Fields of later versions have defaults. 0.33's
`session_id` is of the request that stored a block, not of the block, and is passed over.

A message is bounded before anything is made of it, and its events are decoded one by one, in pieces
of so many blocks that each costs a millisecond or two.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from kvrouter._native import is_blank, read_ids, scan_events, split_array

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BLOCKS: Final = 1 << 17
"""Block hashes of one message: a step may store several prompts of a million tokens."""
MAX_EVENTS: Final = 1 << 17
MAX_VALUES: Final = 1 << 21  # values of msgpack in one message, most of them token ids
PIECE_BLOCKS: Final = 2048  # blocks of a larger event that are applied at a time
LOW64: Final = (1 << 64) - 1

Id = int | bytes


class BadMessage(ValueError):
    """Frames that are no KV event message."""


class TooLarge(BadMessage):
    """A message beyond the bounds."""


NIL: Final = msgspec.Raw(b"\xc0")


class _Stored(msgspec.Struct, gc=False):
    block_hashes: list[Id]
    parent_block_hash: Id | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = NIL  # one list per block
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockStored(_Stored, tag="BlockStored", gc=False):
    """Blocks that an engine's cache holds from now on."""

    manifest: bytes | None = None  # digest of that of the blocks, by which a store node keeps them
    lookahead_token_ids: msgspec.Raw = NIL  # tokens after each block that its name covers
    cache_salt: str | None = None  # SGLang's; vLLM has it among `extra_keys`


class _Removed(msgspec.Struct, gc=False):
    block_hashes: list[Id]
    medium: str | None = None
    group_idx: int | None = None


class BlockRemoved(_Removed, tag="BlockRemoved", gc=False):
    """Blocks that it holds no longer."""

    manifest: bytes | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """It holds nothing any more."""


# As arrays: their order is theirs, so what an engine appends must not be read as our `manifest`.


class _StoredArray(_Stored, tag="BlockStored", array_like=True, gc=False): ...


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True, gc=False): ...


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False): ...


Event = BlockStored | BlockRemoved | AllBlocksCleared

_maps: Final = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_arrays: Final = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_EMPTY: Final = b"\x90"


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One message: its publisher's rank and clock (s), and its events as they were sent."""

    rank: int
    ts: float
    payload: bytes
    ends: memoryview  # where the first event begins, and where each of them ends

    def pieces(self) -> Iterator[Event | None]:
        """Its events in order, large ones in pieces; None: an event of an unknown kind."""
        for begin, end in pairwise(self.ends):
            event = _decode_event(self.payload[begin:end])
            if (
                isinstance(event, AllBlocksCleared | None)
                or len(event.block_hashes) <= PIECE_BLOCKS
            ):
                yield event
            else:
                yield from _pieces(event)


def decode_sequence(frame: bytes) -> int:
    """The sequence number of a message; BadMessage: not 8 bytes."""
    if len(frame) != 8:
        raise BadMessage(f"sequence number of {len(frame)} bytes")
    return int.from_bytes(frame, "big")


def decode_batch(payload: bytes) -> Batch:
    """The message in `payload`; BadMessage: it is none, or (TooLarge) beyond the bounds."""
    try:
        ts, rank, ends = scan_events(payload, MAX_EVENTS, MAX_BLOCKS, MAX_VALUES)
    except ValueError as error:
        raise BadMessage(str(error)) from None
    except OverflowError as error:
        raise TooLarge(f"{error} in {len(payload)} bytes") from None
    return Batch(rank, ts, payload, memoryview(ends).cast("I"))


def _decode_event(raw: bytes) -> Event | None:
    try:
        if _is_map(raw[0]):
            event: Event = _maps.decode(raw)
            return event
        found = _arrays.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(found, _StoredArray):
        return BlockStored(*msgspec.structs.astuple(found))
    if isinstance(found, _RemovedArray):
        return BlockRemoved(*msgspec.structs.astuple(found))
    return AllBlocksCleared()


def _pieces(event: BlockStored | BlockRemoved) -> Iterator[Event]:
    hashes = event.block_hashes
    tokens: list[bytes] = []
    extras: list[bytes] = []
    if isinstance(event, BlockStored):
        per_piece = max(0, min(PIECE_BLOCKS * event.block_size, MAX_VALUES))
        tokens = split_array(bytes(event.token_ids), per_piece)
        extras = split_array(bytes(event.extra_keys), PIECE_BLOCKS)
    for number, at in enumerate(range(0, len(hashes), PIECE_BLOCKS)):
        changes: dict[str, object] = {"block_hashes": hashes[at : at + PIECE_BLOCKS]}
        if isinstance(event, BlockStored):
            changes["parent_block_hash"] = hashes[at - 1] if at else event.parent_block_hash
            changes["token_ids"] = tokens[number] if number < len(tokens) else _EMPTY
            changes["extra_keys"] = extras[number] if number < len(extras) else _EMPTY
        yield msgspec.structs.replace(event, **changes)


def decode_tokens(event: BlockStored) -> memoryview:
    """The token ids of a stored event, as uint32; BadMessage: not a list of such."""
    ids = read_ids(bytes(event.token_ids))
    if ids is None:
        raise BadMessage("token ids that are no list of integers 0..2**32-1")
    return memoryview(ids).cast("I")


def is_plain(event: BlockStored) -> bool:
    """Whether tokens and `cache_salt` alone determine the blocks: no adapter, no `extra_keys`."""
    return event.lora_id is None and event.lora_name is None and is_blank(bytes(event.extra_keys))


def low_ids(names: list[Id]) -> array[int]:
    """`low_id` of each; fast for integers, which vLLM publishes."""
    try:
        return array("Q", names)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return array("Q", map(low_id, names))


def low_id(block: Id) -> int:
    """Low 64 bits of a block's name, an integer or bytes."""
    return block & LOW64 if isinstance(block, int) else int.from_bytes(block[-8:], "big")


def _is_map(first: int) -> bool:
    return first >> 4 == 0x8 or first in (0xDE, 0xDF)  # fixmap, map16, map32 of msgpack
