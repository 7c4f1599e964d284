"""What an engine evicts without telling: the router guesses it from what it sent there."""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.prefix import index as ageing
from kvrouter.prefix.index import STEP_TOKENS, Ageing, PrefixIndex

if TYPE_CHECKING:
    import pytest

PIECE = 128
STEP = STEP_TOKENS // PIECE

chains = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6)).map(
        lambda each: array("Q", [1000 * each[0] + at for at in range(each[1])])
    ),
    max_size=30,
)


def chain(*ids: int) -> bytes:
    return b"".join(bytes(24) + struct.pack(">Q", each) for each in ids)


@given(used=chains, room=st.integers(0, 8))
def test_large_blocks_age_as_in_a_cache_that_evicts_the_least_recently_used(
    used: list[array[int]], room: int
) -> None:
    held, cache = Ageing(), OrderedDict[int, None]()
    for ids in used:
        for each in reversed(ids):
            cache[each] = None
            cache.move_to_end(each)
        gone = [cache.popitem(last=False)[0] for _ in range(max(0, len(cache) - room))]
        assert list(held.used(ids, STEP_TOKENS, room * STEP_TOKENS)) == gone


@given(used=chains, room=st.integers(1, 8))
def test_what_fits_into_the_cache_with_all_that_came_after_it_is_kept(
    used: list[array[int]], room: int
) -> None:
    held, gone = Ageing(), set[int]()
    for ids in used:
        gone -= set(ids)
        gone |= set(held.used(ids, STEP_TOKENS, room * STEP_TOKENS))
    since: set[int] = set()
    for ids in reversed(used):
        since |= set(ids)
        if len(since) > room:
            return
        assert not gone & since


def test_small_blocks_age_in_steps_and_the_chain_matches_up_to_the_step_that_is_gone() -> None:
    index, engine = PrefixIndex(1000), Engine("e:1", Role.DECODE)
    engine.identity = Identity(("m",), kv_tokens=4 * STEP_TOKENS)
    first, second = range(1, 3 * STEP + 1), range(1001, 1001 + 2 * STEP)
    index.guess(engine, chain(*first), PIECE)
    assert index.match(chain(*first)) == {engine: 3 * STEP}
    index.guess(engine, chain(*second), PIECE)
    assert index.match(chain(*second)) == {engine: 2 * STEP}
    assert index.match(chain(*first)) == {engine: 3 * STEP - 1}
    index.guess(engine, chain(*first), PIECE)
    assert index.match(chain(*first)) == {engine: 3 * STEP}


def test_an_engine_that_tells_of_a_boundless_cache_takes_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ageing, "MOST_HELD", 3)
    held = Ageing()
    gone = [held.used(array("Q", [each]), STEP_TOKENS, 1 << 60) for each in range(5)]
    assert [list(each) for each in gone] == [[], [], [], [0], [1]]


def test_nothing_ages_where_the_size_of_the_cache_is_unknown() -> None:
    index, engine = PrefixIndex(10_000), Engine("e:1", Role.DECODE, identity=Identity(("m",)))
    for number in range(50):
        index.guess(engine, chain(*range(100 * number, 100 * number + STEP)), PIECE)
    assert index.match(chain(*range(STEP))) == {engine: STEP}


def test_an_engine_that_left_begins_again_with_an_empty_cache() -> None:
    index, engine = PrefixIndex(1000), Engine("e:1", Role.DECODE)
    engine.identity = Identity(("m",), kv_tokens=STEP_TOKENS)
    index.guess(engine, chain(*range(1, STEP + 1)), PIECE)
    index.clear(engine)
    index.guess(engine, chain(*range(101, 101 + STEP)), PIECE)
    assert index.match(chain(*range(101, 101 + STEP))) == {engine: STEP}
