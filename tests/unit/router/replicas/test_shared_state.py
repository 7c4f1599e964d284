"""What routers agree upon and queue, without Redis: changes, peers, messages, the outbox."""

from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.prefix.index import PrefixIndex
from kvrouter.replicas.changes import MAX_AHEAD_MS, Changes
from kvrouter.replicas.group import FADED_S, GONE_S, MAX_PEERS, Holdings, Peers
from kvrouter.replicas.messages import (
    MAX_CHANGES,
    MAX_ENVELOPE_BYTES,
    MAX_TURN_BYTES,
    VERSION,
    BadEnvelope,
    Change,
    Domain,
    Envelope,
    Guess,
    Item,
    Outbox,
    SnapshotRequest,
    State,
    decode,
    encode,
)

ME, YOU = "0" * 16, "1" * 16
GUESS = Guess("h:1", Domain(16, b"12345678"), b"x" * 8000)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def engine_in(pool: EnginePool, address: str) -> Engine:
    engine = pool.add(address, Role.BOTH)
    pool.join(engine, Identity(("m",)))
    return engine


# -- changes


def test_a_later_saying_replaces_an_earlier_one_also_when_the_clock_went_back() -> None:
    now = [1000]
    one, two = Changes(ME, lambda: now[0]), Changes(YOU, lambda: 900)
    one.record("h:1", "drain")
    assert [c.action for c in two.merge(one.all())] == ["drain"]
    two.record("h:1", "decode")
    assert [c.action for c in one.merge(two.all())] == ["decode"]
    assert one.all() == two.all()
    assert two.merge(one.all()) == []


def test_an_engine_has_one_latest_change_however_it_is_reached() -> None:
    one, late = Changes(ME, lambda: 1000), Changes(YOU, lambda: 1000)
    one.record("https://h:1", "decode")
    one.record("h:1", "drain")
    assert [(c.address, c.action) for c in late.merge(one.all())] == [("h:1", "drain")]
    for address in ("https://h:1", "h:1"):
        one.record(address, "decode")
        assert [(c.address, c.action) for c in late.merge(one.all())] == [(address, "decode")]


def test_a_stamp_far_ahead_is_not_believed() -> None:
    changes = Changes(ME, lambda: 1000)
    assert changes.merge([Change("h:1", "cut", 1001 + MAX_AHEAD_MS, YOU)]) == []


def test_changes_are_bounded_and_the_oldest_go() -> None:
    changes = Changes(ME, lambda: 0)
    for k in range(MAX_CHANGES + 10):
        changes.record(f"h:{k + 1}", "decode")
    kept = {change.address for change in changes.all()}
    assert len(kept) == MAX_CHANGES
    assert "h:1" not in kept
    decode(encode(Envelope(VERSION, ME, 1, [State("", 0, {}, changes.all())])))


SAYINGS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["h:1", "h:2", "https://h:1"]),
        st.sampled_from(["drain", "both"]),
    ),
    max_size=12,
)


@given(SAYINGS, st.randoms())
def test_whatever_the_order_in_which_routers_hear_of_changes_they_agree(
    sayings: list[tuple[int, str, Any]], random: Any
) -> None:
    routers = [Changes(str(k) * 16, lambda: 50) for k in range(3)]
    told = []
    for who, address, action in sayings:
        routers[who].record(address, action)
        told.append(routers[who].all())
    for router in routers:
        heard = [*told, *told]
        random.shuffle(heard)
        for changes in heard:
            router.merge(changes)
    final = [sorted(router.all(), key=lambda c: c.address) for router in routers]
    assert final[0] == final[1] == final[2]


# -- peers


def test_what_others_have_under_way_is_counted_with_ones_own() -> None:
    pool = EnginePool()
    engine, peers = engine_in(pool, "h:1"), Peers(pool)
    ticket = pool.reserve(engine, 10)
    peers.update(YOU, State("", 0, {"h:1": 5, "unknown:1": 7}))
    peers.update("2" * 16, State("", 0, {"h:1": 100}))
    assert (engine.tokens, engine.remote_tokens) == (115, 105)
    peers.update(YOU, State("", 0, {}))
    ticket.release()
    assert (engine.tokens, engine.remote_tokens) == (100, 100)


def test_prefill_legs_of_others_count_too_and_their_end_is_told() -> None:
    now, ends = [100.0], []
    pool = EnginePool(lambda: now[0])
    pool.load_fell = lambda: ends.append(now[0])
    engine, peers = engine_in(pool, "h:1"), Peers(pool)
    pool.reserve(engine, 10, prefill=True, work_s=0.5)
    peers.update(YOU, State("", 0, {"h:1": 30}, None, {"h:1": (2, 30, 1500)}))
    load = engine.prefilling
    assert (load.legs, load.tokens, load.work_s, load.since_s) == (3, 40, 2.0, 100.0)
    assert load.own == (1, 10, 0.5)
    assert not ends
    now[0] = 101.0
    peers.update(YOU, State("", 0, {}))
    assert (load.legs, load.tokens, load.work_s, load.since_s) == (1, 10, 0.5, 101.0)
    assert ends == [101.0]


def test_a_router_that_does_not_tell_its_prefill_legs_has_none() -> None:
    before = msgspec.msgpack.encode([1, YOU, 1, [["s", "old", 0, {"h:1": 5}, None]]])
    (state,) = decode(before).items
    assert isinstance(state, State)
    assert (state.load, state.prefills) == ({"h:1": 5}, {})


def test_an_engine_that_joins_later_has_what_others_sent_it() -> None:
    pool = EnginePool()
    peers = Peers(pool)
    pool.on_join(peers.engine_joined)
    peers.update(YOU, State("", 0, {"h:1": 5}))
    assert engine_in(pool, "h:1").tokens == 5


def test_the_load_of_a_silent_router_fades_and_then_it_is_gone() -> None:
    clock, pool = Clock(), EnginePool()
    engine, peers = engine_in(pool, "h:1"), Peers(pool, clock)
    peers.update(YOU, State("", 0, {"h:1": 5}))
    clock.now += FADED_S
    assert peers.expire() == []
    assert engine.tokens == 5
    clock.now += 0.01
    assert peers.expire() == []
    assert engine.tokens == 0
    clock.now += GONE_S - FADED_S
    assert [peer.id for peer in peers.expire()] == [YOU]
    assert (len(peers), peers.oldest_state_s()) == (0, 0)


def test_routers_are_bounded() -> None:
    peers = Peers(EnginePool())
    told = [peers.update(f"{k:016x}", State("", 0, {})) for k in range(MAX_PEERS + 1)]
    assert told[-1] is None
    assert len(peers) == MAX_PEERS


def test_the_ranks_of_an_engine_are_counted_apart() -> None:
    pool = EnginePool()
    engine = pool.add("h:1", Role.BOTH)
    pool.join(engine, Identity(("m",), ranks=(0, 1)))
    Peers(pool).update(YOU, State("", 0, {"h:1@1": 5}))
    assert [rank.tokens for rank in engine.ranks] == [0, 5]


# -- messages


def test_an_envelope_is_what_it_was() -> None:
    items: list[Item] = [
        State("n", 3, {"h:1": 4}, [Change("h:1", "cut", 5, ME)]),
        GUESS,
        SnapshotRequest(),
    ]
    envelope = Envelope(VERSION, ME, 7, items)
    assert decode(encode(envelope)) == envelope


@pytest.mark.parametrize(
    "item",
    [
        State("n" * 301, 0, {}),
        State("", -1, {}),
        State("", 0, {"h:1": -5}),
        State("", 0, {f"h:{k}": 1 for k in range(5000)}),
        State("", 0, {}, [Change("h:1", "explode", 1, ME)]),  # type: ignore[arg-type]
        State("", 0, {}, [Change("h:1", "cut", 1, "x")]),
        Guess("h:1", Domain(16, b"1"), b"x" * 70_000),
    ],
)
def test_what_is_out_of_bounds_is_no_message(item: Any) -> None:
    with pytest.raises(BadEnvelope, match="malformed"):
        decode(encode(Envelope(VERSION, ME, 1, [item])))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_understood(message: bytes) -> None:
    with suppress(BadEnvelope):
        assert decode(message).version == VERSION


def test_another_version_is_told_apart() -> None:
    with pytest.raises(BadEnvelope, match="version"):
        decode(encode(Envelope(VERSION + 1, "not even an id", -1, [])))


# -- the outbox


def test_items_leave_in_order_in_envelopes_of_bounded_size() -> None:
    outbox = Outbox(ME, "all")
    for _ in range(100):
        outbox.put("all", GUESS)
    outbox.put("you", SnapshotRequest())
    outbox.put("all", State("last", 0, {}))
    sent = list(outbox.messages())
    opened = [decode(content) for _, content in sent]
    assert [channel for channel, _ in sent[-2:]] == ["you", "all"]
    assert [e.number for e in opened] == [*range(1, len(opened) - 1), 0, len(opened) - 1]
    assert sum(len(e.items) for e in opened) == 102
    assert all(len(content) < MAX_ENVELOPE_BYTES + 9000 for _, content in sent)
    assert list(outbox.messages()) == []


def test_one_turn_tells_no_more_than_its_share() -> None:
    outbox = Outbox(ME, "all")
    for _ in range(500):
        outbox.put("all", GUESS)
    told = sum(len(content) for _, content in outbox.messages())
    assert MAX_TURN_BYTES <= told < MAX_TURN_BYTES + MAX_ENVELOPE_BYTES + 9000
    assert list(outbox.messages()) != []


def test_where_there_is_no_room_the_oldest_go_and_the_epoch_says_so() -> None:
    outbox = Outbox(ME, "all", max_bytes=20_000)
    outbox.put("all", State("first", 0, {}))
    assert outbox.epoch == 0
    for _ in range(5):
        outbox.put("all", GUESS)
    assert outbox.epoch > 0
    assert outbox.counts["dropped_items"] == 4
    assert [len(decode(content).items) for _, content in outbox.messages()] == [2]


def test_what_may_not_have_arrived_is_dropped_with_all_that_waits() -> None:
    outbox = Outbox(ME, "all")
    outbox.put("all", GUESS)
    outbox.lost()
    assert (outbox.epoch, outbox.counts["dropped_items"]) == (1, 1)
    assert outbox.room
    assert list(outbox.messages()) == []


# -- guesses


def test_what_was_learnt_of_engines_that_name_no_blocks_reaches_other_routers() -> None:
    here, there = EnginePool(), EnginePool()
    mine, yours = engine_in(here, "h:1"), engine_in(there, "h:1")
    sent: list[Item] = []
    names = bytes(range(64))
    index = PrefixIndex(100)
    counts: Counter[str] = Counter()
    Holdings(here, PrefixIndex(100), None, sent.append, counts).send(mine, names)
    other = Holdings(there, index, None, sent.append, counts)
    for item in sent:
        assert isinstance(item, Guess)
        other.receive(item)
    assert index.match(names) == {yours: 2}
