"""What the router says of an engine's cache: exact, degraded or fallback, why, and what follows."""

import logging

import pytest
from tests.unit.router.prefix.events.test_tracker import (
    IDS,
    TOKENS,
    Wire,
    chain_of,
    make_wire,
    payload,
    removed,
    stored,
)

from kvrouter.prefix.events.confidence import IndexState, Reason
from kvrouter.prefix.events.sequencer import HELD_MESSAGES, REORDER_S
from kvrouter.prefix.events.tracker import DEAD_S, SILENT_S, UNSURE_PROMPTS


@pytest.fixture
def wire() -> Wire:
    return make_wire()


def confidence(wire: Wire) -> Reason:
    return wire.tracker.confidence(wire.engine)


def test_an_engine_without_events_is_guessed(wire: Wire) -> None:
    assert confidence(wire) is Reason.NO_EVENTS
    assert confidence(wire).state is IndexState.FALLBACK
    wire.tracker.computed(wire.engine, chain_of(5), 16)
    assert wire.matched(chain_of(5)) == 1
    assert not wire.tracker.trusts(wire.engine)


def test_guesses_are_forgotten_when_an_engine_begins_to_tell(wire: Wire) -> None:
    wire.tracker.computed(wire.engine, chain_of(5), 16)
    wire.send(stored(IDS, TOKENS))
    assert wire.matched(chain_of(5)) == 0
    assert wire.matched() == 4
    assert confidence(wire) is Reason.COMPLETE


def test_a_publisher_whose_first_messages_are_missing_is_degraded_until_its_cache_is_emptied(
    wire: Wire,
) -> None:
    wire.send(stored(IDS, TOKENS), sequence=77)
    assert confidence(wire) is Reason.LATE
    assert confidence(wire).state is IndexState.DEGRADED
    assert wire.tracker.trusts(wire.engine)  # what it told since is held for certain
    wire.send({"type": "AllBlocksCleared"})
    assert confidence(wire) is Reason.COMPLETE


def test_nothing_is_trusted_while_messages_are_missing(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS))
    wire.send(sequence=2)
    assert confidence(wire) is Reason.GAP
    assert not wire.tracker.trusts(wire.engine)
    wire.send(removed(IDS[1:]), sequence=1)
    assert confidence(wire) is Reason.COMPLETE
    assert wire.matched() == 1


def test_what_was_known_before_lost_messages_is_forgotten(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS))
    wire.send(stored([9], [0] * 16, parent=4711), sequence=3)
    wire.wait(REORDER_S)
    assert confidence(wire) is Reason.LOST
    assert wire.matched() == 0
    assert wire.matched(chain_of(9)) == 1
    assert wire.tracker.counts["lost"] == 2


def test_duplicates_and_stragglers_change_nothing(wire: Wire) -> None:
    for _ in range(3):
        wire.send(stored(IDS, TOKENS), sequence=0)
    wire.send(removed(IDS[1:]))
    wire.send(stored(IDS, TOKENS), sequence=0)
    assert wire.matched() == 1
    assert wire.tracker.counts["duplicates"] == 3
    assert wire.tracker.counts["restarts"] == 0


def test_messages_kept_for_a_gap_are_bounded(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS))
    for number in range(2, HELD_MESSAGES + 100):
        wire.send(sequence=number)
    used = wire.tracker.budget.used_bytes
    assert used == HELD_MESSAGES * len(payload())
    wire.tracker.budget.limit_bytes = used  # as if other engines had taken the rest
    wire.send(sequence=HELD_MESSAGES + 200)
    assert wire.tracker.budget.used_bytes == used
    wire.pool.leave(wire.engine)
    assert wire.tracker.budget.used_bytes == 0


def test_without_room_for_messages_the_engine_is_learnt_again(wire: Wire) -> None:
    wire.tracker.budget.limit_bytes = 0
    wire.send(stored(IDS, TOKENS))
    wire.send(sequence=2)
    wire.wait(REORDER_S)
    assert wire.matched() == 0
    wire.send(stored(IDS, TOKENS), sequence=4)
    assert confidence(wire) is Reason.LATE
    assert wire.matched() == 4


def test_an_engine_that_computes_without_events_is_no_longer_trusted(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS))
    wire.tracker.computed(wire.engine, chain_of(5), 16)
    wire.wait(SILENT_S - 1)
    assert confidence(wire) is Reason.COMPLETE
    wire.wait(2)
    assert confidence(wire) is Reason.SILENT
    assert not wire.tracker.trusts(wire.engine)
    assert wire.matched() == 4  # still good enough to choose by
    wire.send(stored([5], [0] * 16, parent=4711))
    wire.wait(0)
    assert confidence(wire) is Reason.COMPLETE
    assert wire.matched() == 4


def test_an_engine_silent_for_long_is_guessed_until_it_sends_events_again(
    wire: Wire,
) -> None:
    wire.send(stored(IDS, TOKENS))
    wire.tracker.computed(wire.engine, chain_of(5), 16)
    for _ in range(int(DEAD_S) + 1):
        wire.wait(1)
    assert confidence(wire) is Reason.DEAD
    assert confidence(wire).state is IndexState.FALLBACK
    wire.tracker.computed(wire.engine, chain_of(6), 16)
    assert wire.matched(chain_of(6)) == 1
    wire.send(stored([7], [0] * 16, parent=4711))
    wire.wait(0)
    assert confidence(wire) is Reason.LATE
    assert [wire.matched(chain_of(each)) for each in (IDS[0], 6, 7)] == [0, 0, 1]


def test_blocks_with_an_event_are_not_owed(wire: Wire) -> None:
    wire.send(stored([5], [0] * 16, parent=4711))
    wire.tracker.computed(wire.engine, chain_of(5), 16)
    wire.wait(SILENT_S + 1)
    assert confidence(wire) is Reason.COMPLETE


def test_where_not_all_is_known_one_silent_prompt_proves_nothing(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS), sequence=77)
    for number in range(UNSURE_PROMPTS):
        assert confidence(wire) is Reason.LATE
        wire.tracker.computed(wire.engine, chain_of(100 + number), 16)
        wire.wait(SILENT_S)
    assert confidence(wire) is Reason.SILENT


def test_blocks_whose_names_are_no_longer_kept_leave_the_index() -> None:
    wire = make_wire(max_names=2)
    wire.send(stored([71, 72], TOKENS[:32]))
    wire.send(stored([73], TOKENS[32:48], parent=72))
    assert wire.matched() == 0  # the first block's name is gone: its removal could not be read
    wire.wait(0)
    assert confidence(wire) is Reason.UNNAMED


def test_blocks_that_a_full_index_forgot_are_reported() -> None:
    wire = make_wire(blocks=4)
    wire.send(stored(IDS, TOKENS))
    assert confidence(wire) is Reason.COMPLETE
    wire.send(stored([8], [0] * 16, parent=4711))
    assert confidence(wire) is Reason.FULL
    assert wire.tracker.trusts(wire.engine)
    assert len(wire.index) == 4
    wire.send({"type": "AllBlocksCleared"})
    assert confidence(wire) is Reason.COMPLETE


def test_a_change_is_logged_once(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        wire.send(stored(IDS, TOKENS), sequence=5)
        wire.send(sequence=6)
        wire.wait(1)
    assert caplog.text.count("DEGRADED (late), was FALLBACK (no events)") == 1
