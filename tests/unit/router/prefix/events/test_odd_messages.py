"""Events of the right outer shape and any content at all: counted or applied, never raised."""

import struct
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.router.prefix.events.test_tracker import (
    IDS,
    TOKENS,
    make_wire,
    payload,
    removed,
    stored,
)

odd = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=40)
    | st.lists(st.integers(-(1 << 40), 1 << 40) | st.binary(max_size=40), max_size=5)
    | st.lists(st.none() | st.lists(st.text(max_size=3), max_size=2), max_size=3)
)
fields = st.dictionaries(
    st.sampled_from([*stored([], []), "locality", "anything"]), odd, max_size=5
)
events = st.one_of(
    fields.map(lambda more: stored(IDS, TOKENS) | more),
    fields.map(lambda more: removed(IDS) | more),
    fields.map(lambda more: {"type": "AllBlocksCleared"} | more),
    st.lists(odd, max_size=8).map(lambda items: ["BlockStored", *items]),
    st.lists(odd, max_size=4).map(lambda items: ["BlockRemoved", *items]),
)


@settings(max_examples=300)
@given(st.lists(st.lists(events, max_size=4), max_size=4))
def test_events_of_any_content_raise_nothing_and_leave_the_ledger_working(
    messages: list[list[Any]],
) -> None:
    wire = make_wire()
    for sequence, batch in enumerate(messages):
        wire.tracker.receive([b"kv@e:1", struct.pack(">Q", sequence), payload(*batch)])
    wire.tracker.receive([b"kv@e:1", struct.pack(">Q", len(messages)), payload()])
    assert wire.tracker.counts["messages"] == len(messages) + 1
    wire.pool.leave(wire.engine)
    assert wire.matched() == 0


@given(st.lists(odd, max_size=4))
def test_batches_of_any_content_raise_nothing(items: list[Any]) -> None:
    wire = make_wire()
    wire.tracker.receive([b"kv@e:1", bytes(8), msgspec.msgpack.encode(items)])
    assert wire.tracker.counts["messages"] + wire.tracker.counts["malformed"] == 1
