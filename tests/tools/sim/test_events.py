"""KV events: the frames that vLLM 0.32 publishes."""

import msgspec

from kvrouter.tools.sim.block_cache import Cleared, Removed, Stored
from kvrouter.tools.sim.events import EventEncoder

A, B = bytes(24) + b"\x00" * 7 + b"\x01", bytes(24) + b"\xff" * 8


def batch(encoder: EventEncoder, *events: Stored | Removed | Cleared) -> tuple[int, list[object]]:
    topic, number, payload = encoder.frames(b"kv@h:1", list(events))
    assert topic == b"kv@h:1"
    assert len(number) == 8
    ts, decoded, rank = msgspec.msgpack.decode(payload)
    assert (ts, rank) == (12.5, 0)
    return int.from_bytes(number, "big"), decoded


def test_batches_are_numbered_from_zero() -> None:
    encoder = EventEncoder(2, clock=lambda: 12.5)
    assert [batch(encoder, Cleared())[0] for _ in range(3)] == [0, 1, 2]


def test_a_stored_chain_names_its_blocks_by_their_low_64_bits() -> None:
    encoder = EventEncoder(2, clock=lambda: 12.5)
    _, events = batch(encoder, Stored(A, (B,), (7, 8)))
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1],
            "parent_block_hash": 1,
            "token_ids": [7, 8],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]


def test_only_the_first_block_of_a_chain_has_the_salt() -> None:
    encoder = EventEncoder(1, clock=lambda: 12.5)
    _, events = batch(encoder, Stored(None, (A, B), (7, 8), "salt"), Stored(A, (B,), (8,), "salt"))
    assert isinstance(events[0], dict)
    assert isinstance(events[1], dict)
    assert events[0]["extra_keys"] == [["salt"], None]
    assert events[1]["extra_keys"] == [None]


def test_removed_and_cleared_have_their_own_maps() -> None:
    encoder = EventEncoder(2, clock=lambda: 12.5)
    _, events = batch(encoder, Removed((A, B)), Cleared())
    assert events == [
        {"type": "BlockRemoved", "block_hashes": [1, 2**64 - 1], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]
