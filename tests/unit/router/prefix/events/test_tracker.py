"""KV events: both encodings, lost messages, foreign names."""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.conftest import Clock, joined

from kvrouter.engines.engine import Engine, HashDomain, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.events.mapping import Naming
from kvrouter.prefix.events.messages import (
    PIECE_BLOCKS,
    AllBlocksCleared,
    BadMessage,
    BlockRemoved,
    BlockStored,
    decode_batch,
    decode_tokens,
    is_plain,
    low_id,
)
from kvrouter.prefix.events.sequencer import REORDER_S
from kvrouter.prefix.events.tracker import CacheTracker
from kvrouter.prefix.index import PrefixIndex, block_ids
from kvrouter.prefix.lower import NOTHING, Loadable, LowerTiers
from kvrouter_store.identity.chain import hash_tokens, root_hash

BLOCK = 16
TOKENS = list(range(1000, 1000 + 4 * BLOCK))
HASHES = hash_tokens(TOKENS, BLOCK, root=root_hash(None)).data
IDS = list(block_ids(HASHES))


def stored(
    ids: Sequence[int | bytes],
    tokens: list[int],
    parent: int | bytes | None = None,
    **more: Any,
) -> dict[str, Any]:
    """As vLLM 0.32 publishes it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(ids),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(ids),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | more


def removed(ids: Sequence[int], medium: str = "GPU", group: int | None = 0) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(ids), "medium": medium, "group_idx": group}


def payload(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


@dataclass
class Wire:
    """One engine, and the router's side of its events."""

    tracker: CacheTracker
    index: PrefixIndex
    pool: EnginePool
    engine: Engine
    sequence: int = 0
    topic: bytes = b"kv@e:1"
    clock: Clock = field(default_factory=Clock)

    def send(self, *events: Any, sequence: int | None = None, rank: int = 0) -> None:
        if sequence is not None:
            self.sequence = sequence
        frames = [self.topic, struct.pack(">Q", self.sequence), payload(*events, rank=rank)]
        self.sequence += 1
        self.tracker.receive(frames)

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.tracker.tick()

    def matched(self, hashes: bytes = HASHES) -> int:
        return self.index.match(hashes).get(self.engine, 0)

    def loadable(self, hashes: bytes = HASHES) -> Loadable:
        return self.tracker.held(hashes).lower.get(self.engine, NOTHING)


def make_wire(max_names: int = 1000, blocks: int = 10_000) -> Wire:
    clock, index = Clock(), PrefixIndex(blocks)
    pool, lower = EnginePool(clock), LowerTiers(blocks)
    tracker = CacheTracker(index, pool.find, pool.domain_of, max_names, clock, lower=lower)
    pool.on_leave(index.clear)
    pool.on_join(tracker.engine_joined)
    pool.on_leave(tracker.engine_left)
    engine = joined(pool, "e:1", Role.PREFILL, block_tokens=BLOCK)
    return Wire(tracker, index, pool, engine, clock=clock)


@pytest.fixture
def wire() -> Wire:
    return make_wire()


def test_blocks_that_an_engine_stores_are_matched_until_it_removes_them(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS))
    assert wire.matched() == 4
    wire.send(removed(IDS[2:]))
    assert wire.matched() == 2
    assert wire.tracker.naming(wire.engine) is Naming.EXACT


def test_events_of_older_versions_are_arrays_and_mean_the_same(wire: Wire) -> None:
    wire.send(["BlockStored", IDS[:3], None, TOKENS[: 3 * BLOCK], BLOCK, None])
    wire.send(["BlockStored", IDS[3:], IDS[2], TOKENS[3 * BLOCK :], BLOCK, None, "GPU"])
    assert wire.matched() == 4
    wire.send(["BlockRemoved", IDS[1:]], ["BlockRemoved", [7], "GPU"])
    assert wire.matched() == 1
    assert wire.tracker.naming(wire.engine) is Naming.EXACT


def test_names_may_be_whole_hashes_in_bytes(wire: Wire) -> None:
    wire.send(stored([HASHES[at : at + 32] for at in range(0, 128, 32)], TOKENS))
    assert wire.matched() == 4
    assert wire.tracker.naming(wire.engine) is Naming.EXACT


def test_clearing_the_cache_forgets_everything(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS))
    wire.send({"type": "AllBlocksCleared"})
    assert wire.matched() == 0
    wire.send(stored(IDS[:1], TOKENS[:BLOCK]))
    wire.send(["AllBlocksCleared"])
    assert wire.matched() == 0


def test_a_lost_message_empties_the_engines_part(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS))
    wire.send(stored([1], [0] * BLOCK, parent=IDS[3]), sequence=5)
    assert wire.tracker.confidence(wire.engine) is Reason.GAP
    wire.wait(REORDER_S)
    assert wire.matched() == 0
    assert wire.tracker.confidence(wire.engine) is Reason.LOST
    assert wire.tracker.counts["gaps"] == 1
    assert len(wire.index.match(chain_of(1))) == 1


def chain_of(low: int) -> bytes:
    return bytes(24) + struct.pack(">Q", low)


def test_a_publisher_that_counts_from_the_start_again_was_restarted(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS))
    wire.send(stored(IDS[:1], TOKENS[:BLOCK]), sequence=0)
    assert wire.matched() == 1
    assert wire.tracker.counts["restarts"] == 1


def test_a_router_that_comes_late_takes_the_first_number_as_it_is(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS), sequence=77)
    assert wire.matched() == 4
    assert wire.tracker.counts["gaps"] == 0


def test_each_data_parallel_rank_counts_its_own_messages(wire: Wire) -> None:
    wire.send(stored(IDS[:1], TOKENS[:BLOCK]), sequence=0, rank=0)
    wire.send(stored(IDS[1:2], TOKENS[BLOCK : 2 * BLOCK], IDS[0]), sequence=9, rank=1)
    wire.send(sequence=1, rank=0)
    wire.send(sequence=10, rank=1)
    assert wire.tracker.counts["gaps"] == 0
    assert wire.matched() == 2


def test_names_of_another_hash_are_mapped_through_the_token_ids(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    wire.send(stored([71, 72], TOKENS[: 2 * BLOCK]))
    wire.send(stored([73, 74], TOKENS[2 * BLOCK :], parent=72))
    assert wire.matched() == 4
    assert wire.tracker.naming(wire.engine) is Naming.MAPPED
    assert wire.tracker.counts["foreign_names"] == 1
    assert "sha256_cbor" in caplog.text
    wire.send(removed([74, 73, 999]))
    assert wire.matched() == 2


def test_foreign_blocks_whose_parent_is_unknown_are_counted_not_guessed(wire: Wire) -> None:
    wire.send(stored([71], TOKENS[:BLOCK]))
    wire.send(stored([90, 91], TOKENS[:32], parent=4711))
    assert wire.tracker.counts["unmapped_blocks"] == 2
    assert wire.matched() == 1


def test_blocks_of_another_size_are_left_out_with_the_remedy(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    wire.send(stored([1, 2], TOKENS, block_size=32))
    assert wire.tracker.naming(wire.engine) is Naming.FOREIGN
    assert wire.tracker.counts["unmapped_blocks"] == 2
    assert f"--block-size {BLOCK}" in caplog.text
    wire.send(removed([1, 2]))


def test_a_salted_chain_does_not_decide_how_an_engine_names_blocks(wire: Wire) -> None:
    salted = hash_tokens(TOKENS, BLOCK, root=root_hash(None), cache_salt="s").data
    wire.send(stored(list(block_ids(salted)), TOKENS, extra_keys=[["s"], None, None, None]))
    assert wire.tracker.naming(wire.engine) is Naming.UNKNOWN
    assert wire.matched(salted) == 4


def test_names_kept_of_a_foreign_engine_are_bounded() -> None:
    wire = make_wire(max_names=2)
    wire.send(stored([71, 72], TOKENS[:32]))
    wire.send(stored([73], TOKENS[32:48], parent=72))
    wire.send(stored([75], TOKENS[:BLOCK], parent=71))
    assert wire.tracker.counts["unmapped_blocks"] == 1


def test_only_the_first_full_attention_group_counts(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS))
    wire.send(stored([6], [0] * BLOCK, group_idx=1, kv_cache_spec_kind="sliding_window"))
    wire.send(removed(IDS, group=1))
    assert wire.matched() == 4
    assert wire.tracker.counts["other_group"] == 2
    assert wire.index.match(chain_of(6)) == {}


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_a_group_with_the_whole_history_counts_whatever_its_kind(
    wire: Wire, kind: str | None
) -> None:
    wire.send(stored(IDS, TOKENS, kv_cache_spec_kind=kind))
    assert wire.matched() == 4
    assert wire.tracker.confidence(wire.engine) is Reason.COMPLETE
    wire.send(stored([5], [0] * BLOCK, group_idx=1, kv_cache_spec_kind="mamba"))
    assert wire.tracker.confidence(wire.engine) is Reason.COMPLETE


@pytest.mark.parametrize("kind", ["sliding_window", "unknown", "a kind of tomorrow"])
def test_the_index_is_not_exact_of_an_engine_none_of_whose_blocks_count(
    wire: Wire, kind: str
) -> None:
    wire.send(stored(IDS, TOKENS, kv_cache_spec_kind=kind))
    assert wire.tracker.confidence(wire.engine) is Reason.UNCOUNTED
    assert wire.tracker.computed(wire.engine, HASHES, BLOCK), "guesses stand in for its events"
    wire.send(stored(IDS, TOKENS, kv_cache_spec_kind=kind))
    assert wire.matched() == 4
    wire.send(stored(IDS[:1], TOKENS[:BLOCK], group_idx=1))
    assert wire.matched() == 1
    assert wire.tracker.confidence(wire.engine) is Reason.COMPLETE
    wire.send(stored(IDS[1:2], TOKENS[BLOCK : 2 * BLOCK], parent=IDS[0], group_idx=1))
    assert wire.matched() == 2


def test_what_an_engine_appends_to_its_arrays_is_passed_over(wire: Wire) -> None:
    more = [None, 0, "full_attention", 4096, "LOCAL", "owner", "session", {"of": "tomorrow"}]
    wire.send(["BlockStored", IDS, None, TOKENS, BLOCK, None, "GPU", None, *more])
    assert wire.matched() == 4
    wire.send(["BlockRemoved", IDS[3:], "GPU", 0, "LOCAL", 7])
    assert wire.matched() == 3
    assert wire.tracker.counts["unknown_event"] == 0


@given(st.data())
def test_a_large_event_is_applied_in_pieces_as_if_whole(data: st.DataObject) -> None:
    blocks = data.draw(st.sampled_from([PIECE_BLOCKS, PIECE_BLOCKS + 1, 2 * PIECE_BLOCKS + 7]))
    tokens = list(range(blocks * BLOCK))
    hashes = hash_tokens(tokens, BLOCK, root=root_hash(None)).data
    foreign = data.draw(st.booleans(), "whether names must be mapped")
    names = [number + 1 if foreign else own for number, own in enumerate(block_ids(hashes))]
    wire = make_wire(max_names=10_000)
    wire.send(stored(names, tokens))
    assert wire.matched(hashes) == blocks
    wire.send(removed(names[PIECE_BLOCKS - 1 :]))
    assert wire.matched(hashes) == PIECE_BLOCKS - 1


def test_messages_wait_their_turn_in_order_and_are_dropped_with_their_publisher() -> None:
    wire = make_wire()
    clock = Clock()

    def late() -> float:
        clock.now += 1.0
        return clock.now

    wire.tracker = CacheTracker(wire.index, wire.pool.find, wire.pool.domain_of, clock=late)
    woken: list[bool] = []
    wire.tracker.wake = lambda: woken.append(True)
    wire.send(stored(IDS[:1], TOKENS[:BLOCK]), stored(IDS[1:2], TOKENS[BLOCK : 2 * BLOCK], IDS[0]))
    assert (wire.matched(), woken) == (1, [True])
    wire.send(removed(IDS[:2]))
    assert wire.matched() == 2
    while wire.tracker.work():
        pass
    assert wire.matched() == 0
    wire.send(stored(IDS[:1], TOKENS[:BLOCK]), stored(IDS[1:2], TOKENS[BLOCK : 2 * BLOCK], IDS[0]))
    wire.send({"type": "AllBlocksCleared"}, sequence=0)  # it restarted: what waits is void
    while wire.tracker.work():
        pass
    assert wire.matched() == 0


def test_a_message_that_cannot_be_read_is_missing_until_the_next_shows_it(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS))
    wire.tracker.receive([wire.topic, struct.pack(">Q", 1), b"\xc1"])
    assert wire.tracker.confidence(wire.engine) is Reason.CUT
    wire.send(removed(IDS[3:]), sequence=2)
    assert wire.tracker.confidence(wire.engine) is Reason.GAP


def test_when_an_engine_was_last_heard_is_known(wire: Wire) -> None:
    assert wire.tracker.heard_s(wire.engine) is None
    wire.send(stored(IDS, TOKENS))
    wire.clock.now += 3.0
    assert wire.tracker.heard_s(wire.engine) == wire.clock.now - 3.0
    wire.send(removed(IDS))
    assert wire.tracker.heard_s(wire.engine) == wire.clock.now
    wire.pool.leave(wire.engine)
    assert wire.tracker.heard_s(wire.engine) is None


def test_an_engine_that_left_is_learnt_again(wire: Wire) -> None:
    wire.send(stored([71], TOKENS[:BLOCK]))
    wire.pool.leave(wire.engine)
    assert wire.tracker.naming(wire.engine) is None
    assert wire.tracker.confidence(wire.engine) is Reason.NO_EVENTS
    assert wire.matched() == 0


def test_a_new_hash_domain_of_the_fleet_makes_names_be_learnt_again(wire: Wire) -> None:
    domain: list[HashDomain] = [HashDomain(BLOCK, root_hash(None))]
    tracker = CacheTracker(wire.index, wire.pool.find, lambda _: domain[0])
    wire.tracker = tracker
    wire.send(stored(IDS, TOKENS))
    domain[0] = HashDomain(BLOCK, root_hash("0"))
    seeded = hash_tokens(TOKENS, BLOCK, root=root_hash("0")).data
    wire.send(stored(IDS, TOKENS))
    assert tracker.naming(wire.engine) is Naming.MAPPED
    assert (wire.matched(), wire.matched(seeded)) == (0, 4)


def test_a_topic_that_names_no_engine_is_counted_and_logged_once(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    for topic in (b"kv@nobody:1", b"other", b"", b"kv@", b"kv@e:1@model"):
        wire.topic = topic
        wire.send(stored(IDS, TOKENS))
    assert wire.tracker.counts["unknown_topic"] == 4
    assert wire.matched() == 4
    assert caplog.text.count("nobody") == 1


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"kv@e:1"],
        [b"kv@e:1", b"short", payload()],
        [b"kv@e:1", bytes(8), b"\xc1"],
        [b"kv@e:1", bytes(8), msgspec.msgpack.encode({"ts": 1})],
        [b"kv@e:1", bytes(8), payload(), b"more"],
        [b"\xff\xfe", bytes(8), payload()],
    ],
)
def test_malformed_messages_are_counted_and_change_nothing(wire: Wire, frames: list[bytes]) -> None:
    wire.tracker.receive(frames)
    assert wire.tracker.counts["malformed"] == 1
    assert wire.tracker.counts["messages"] == 0


def test_events_of_unknown_kinds_are_counted_beside_those_that_are_known(wire: Wire) -> None:
    wire.send({"type": "BlockDreamt"}, stored(IDS, TOKENS), ["Nonsense", 1], 7)
    assert wire.tracker.counts["unknown_event"] == 3
    assert wire.matched() == 4


PUBLISHED = bytes.fromhex(
    "93cb3ff0000000000000948ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cfd1e0"
    "085c24d4fad901b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980001020304050607aa"
    "626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa657874"
    "72615f6b65797392c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f"
    "617474656e74696f6e8fa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c408787878"
    "7878787878b1706172656e745f626c6f636b5f68617368c4087979797979797979a9746f6b656e5f696473940101"
    "0101aa626c6f636b5f73697a6504a76c6f72615f696401a66d656469756da3435055a96c6f72615f6e616d65a16c"
    "aa65787472615f6b6579739191a16ca967726f75705f69647801b26b765f63616368655f737065635f6b696e64ae"
    "736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e646f7740a86c"
    "6f63616c697479a54c4f43414ca96f776e657273686970a16faa73657373696f6e5f6964a17384a474797065ac42"
    "6c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da3475055a967726f75705f6964"
    "780081a474797065b0416c6c426c6f636b73436c656172656401"
)
"""A KVEventBatch of vLLM 0.32, encoded by its own classes: two stored, one removed, one cleared."""


def test_what_vllm_encodes_itself_is_read() -> None:
    batch = decode_batch(PUBLISHED)
    first, second, third, fourth = batch.pieces()
    assert (batch.rank, batch.ts) == (1, 1.0)
    assert isinstance(first, BlockStored)
    assert first.block_hashes == [15123096740558076633, 1]
    assert (list(decode_tokens(first)), first.block_size) == (list(range(8)), 4)
    assert (first.group_idx, first.kv_cache_spec_kind) == (0, "full_attention")
    assert isinstance(second, BlockStored)
    assert (second.block_hashes, second.parent_block_hash) == ([b"x" * 8], b"y" * 8)
    assert (second.medium, second.lora_name) == ("CPU", "l")
    assert (is_plain(first), is_plain(second)) == (True, False)
    assert isinstance(third, BlockRemoved)
    assert third.block_hashes == [1]
    assert isinstance(fourth, AllBlocksCleared)


def test_tokens_that_are_no_numbers_are_no_tokens(wire: Wire) -> None:
    event = next(decode_batch(payload(stored(IDS, TOKENS, token_ids=["x"]))).pieces())
    assert isinstance(event, BlockStored)
    with pytest.raises(BadMessage):
        decode_tokens(event)
    wire.send(stored(IDS, TOKENS, token_ids=["x"]))
    assert wire.tracker.naming(wire.engine) is Naming.MAPPED


@given(st.integers(-(1 << 63), (1 << 64) - 1), st.binary(min_size=8, max_size=32))
def test_a_name_is_its_low_64_bits(number: int, name: bytes) -> None:
    assert low_id(number) == number % (1 << 64)
    assert low_id(name) == int.from_bytes(name, "big") % (1 << 64)


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_no_frames_whatsoever_raise(frames: list[bytes]) -> None:
    wire = make_wire()
    wire.tracker.receive(frames)
    wire.tracker.receive([b"kv@e:1", bytes(8), *frames[:1]])
    assert wire.tracker.counts["malformed"] + wire.tracker.counts["messages"] >= 1


def test_repeated_warnings_grow_rare(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    wire.topic = b"kv@nobody:1"
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            wire.send()
    assert caplog.text.count("nobody") == 7
