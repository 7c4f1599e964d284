"""The KV events of vLLM as messages: decoding only, no state.

Source: vllm/distributed/kv_events.py of vLLM 0.32 (map-encoded events) and its versions before
(array-encoded ones). A message is three frames: topic, sequence number (8 bytes big-endian), and
msgpack `[ts, [event...], data_parallel_rank]`. Fields of later versions have defaults.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import msgspec

LOW64: Final = (1 << 64) - 1

Id = int | bytes


class BadMessage(ValueError):
    """Frames that are no KV event message."""


class _Stored(msgspec.Struct, gc=False):
    block_hashes: list[Id]
    parent_block_hash: Id | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockStored(_Stored, tag="BlockStored", gc=False):
    """Blocks that an engine's cache holds from now on."""

    manifest: bytes | None = None  # digest of that of the blocks, by which a store node keeps them


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


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


Event = BlockStored | BlockRemoved | AllBlocksCleared

_batches: Final = msgspec.msgpack.Decoder(_Batch)
_maps: Final = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_arrays: Final = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_tokens: Final = msgspec.msgpack.Decoder(list[int])


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One message: its events in order, the number of unknown ones, the publisher's clock (s)."""

    rank: int
    events: list[Event]
    unknown: int
    ts: float = 0.0


def decode_sequence(frame: bytes) -> int:
    """The sequence number of a message; BadMessage: not 8 bytes."""
    if len(frame) != 8:
        raise BadMessage(f"sequence number of {len(frame)} bytes")
    return int.from_bytes(frame, "big")


def decode_batch(payload: bytes) -> Batch:
    """The events of a message, in either encoding; BadMessage: the payload is no such array."""
    try:
        batch = _batches.decode(payload)
    except msgspec.DecodeError as error:
        raise BadMessage(str(error)) from None
    events: list[Event] = []
    unknown = 0
    for raw in batch.events:
        try:
            events.append(_decode_event(raw))
        except msgspec.DecodeError:
            unknown += 1
    return Batch(batch.data_parallel_rank or 0, events, unknown, batch.ts)


def _decode_event(raw: msgspec.Raw) -> Event:
    if _is_map(memoryview(raw)[0]):
        return _maps.decode(raw)
    found = _arrays.decode(raw)
    if isinstance(found, _StoredArray):
        return BlockStored(*msgspec.structs.astuple(found))
    if isinstance(found, _RemovedArray):
        return BlockRemoved(*msgspec.structs.astuple(found))
    return AllBlocksCleared()


def decode_tokens(event: BlockStored) -> list[int]:
    """The token ids of a stored event; BadMessage: not a list of integers."""
    try:
        return _tokens.decode(event.token_ids)
    except msgspec.DecodeError as error:
        raise BadMessage(str(error)) from None


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
