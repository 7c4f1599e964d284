import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter._native import PrefixTable
from kvrouter.engines.engine import Engine, Role
from kvrouter.prefix.index import MAX_ENGINES, PrefixIndex, block_ids
from kvrouter_store import _core

ENGINES = [Engine(f"e:{port}", Role.PREFILL) for port in range(1, 5)]


def chain(*ids: int) -> bytes:
    return b"".join(bytes(24) + struct.pack(">Q", each) for each in ids)


@given(st.binary(max_size=40 * 32).map(lambda data: data[: len(data) // 32 * 32]))
def test_ids_are_the_low_64_bits_as_the_core_has_them(hashes: bytes) -> None:
    assert list(block_ids(hashes)) == list(_core.low64(hashes))


def test_an_engine_matches_as_many_leading_blocks_as_it_holds() -> None:
    index = PrefixIndex(1000)
    first, second, third, _ = ENGINES
    index.stored(first, range(1, 101))
    index.stored(second, range(1, 38))
    index.stored(third, range(500, 600))
    assert index.match(chain(*range(1, 101))) == {first: 100, second: 37}
    assert index.match(chain(*range(1, 201))) == {first: 100, second: 37}
    assert index.match(chain(7)) == {first: 1, second: 1}
    assert index.match(chain(999)) == {}
    assert index.match(b"") == {}


def test_blocks_credited_by_their_hashes_are_those_of_their_ids() -> None:
    index = PrefixIndex(1000)
    index.credit(ENGINES[0], chain(0, 1, 2))
    index.removed(ENGINES[0], [2])
    assert index.match(chain(0, 1, 2)) == {ENGINES[0]: 2}


def test_an_engine_that_left_matches_nothing_and_may_come_back() -> None:
    index = PrefixIndex(1000)
    first, second, *_ = ENGINES
    index.stored(first, [1, 2, 3])
    index.stored(second, [1, 2])
    index.clear(first)
    assert index.match(chain(1, 2, 3)) == {second: 2}
    index.stored(first, [1])
    assert index.match(chain(1, 2, 3)) == {first: 1, second: 2}


def test_sweeping_frees_blocks_without_a_holder() -> None:
    index = PrefixIndex(1000)
    first, second, *_ = ENGINES
    index.stored(first, range(100))
    index.stored(second, [5])
    index.clear(first)
    steps = 1
    while not index.sweep(100):
        steps += 1
    assert steps == 1502 // 100 + 1
    assert len(index) == 1
    assert index.match(chain(5)) == {second: 1}


def test_engines_may_come_and_go_without_end() -> None:
    index = PrefixIndex(1000)
    for number in range(5 * MAX_ENGINES):
        engine = Engine(f"e:{number + 1}", Role.DECODE)
        index.stored(engine, range(10))
        assert index.match(chain(*range(20))) == {engine: 10}
        index.clear(engine)


def test_more_engines_than_can_be_indexed_are_left_out() -> None:
    index = PrefixIndex(1000)
    engines = [Engine(f"e:{number + 1}", Role.DECODE) for number in range(MAX_ENGINES + 1)]
    for engine in engines:
        index.stored(engine, [1])
    assert index.match(chain(1)) == dict.fromkeys(engines[:-1], 1)


def test_each_of_a_thousand_ranks_matches_as_far_as_it_holds_a_chain() -> None:
    index, ranks = PrefixIndex(4096), [Engine(f"e:1@{rank}", Role.DECODE) for rank in range(1024)]
    for rank, engine in enumerate(ranks):
        index.stored(engine, range(1, 2 * rank + 3))
    assert index.match(chain(*range(1, 2049))) == {e: 2 * n + 2 for n, e in enumerate(ranks)}
    for engine in ranks[::2]:
        index.clear(engine)
    for engine in ranks[1::4]:
        index.removed(engine, range(100, 2049))
    while not index.sweep(100):
        pass
    expected = {e: 2 * n + 2 if n % 4 == 3 else min(2 * n + 2, 99) for n, e in enumerate(ranks)}
    assert index.match(chain(*range(1, 2049))) == dict(list(expected.items())[1::2])
    assert len(index) == 2048
    assert index.forgotten == 0


def test_beyond_its_bound_the_index_forgets_blocks_not_used_lately() -> None:
    index = PrefixIndex(100)
    index.stored(ENGINES[0], range(100))
    for block in range(100, 400):
        index.match(chain(*range(10)))  # in use all the time
        index.stored(ENGINES[0], [block])
        assert len(index) == 100
    assert index.match(chain(*range(10))) == {ENGINES[0]: 10}
    assert index.match(chain(399)) == {ENGINES[0]: 1}


steps = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["store", "credit", "remove", "clear", "sweep"]),
    st.sets(st.integers(1, 41), max_size=15),
)


@settings(max_examples=300)
@given(actions=st.lists(steps, max_size=40), asked=st.integers(0, 41), swept=st.integers(1, 80))
def test_matches_are_exact_whatever_engines_store_and_drop(
    actions: list[tuple[int, str, set[int]]], asked: int, swept: int
) -> None:
    """Against the plain definition; in a table of 63 slots collisions are common."""
    index = PrefixIndex(41)
    held: dict[Engine, set[int]] = {engine: set() for engine in ENGINES}
    for which, action, blocks in actions:
        engine = ENGINES[which]
        if action == "store":
            index.stored(engine, blocks)
            held[engine] |= blocks
        elif action == "credit":
            index.credit(engine, chain(*blocks))
            held[engine] |= blocks
        elif action == "remove":
            index.removed(engine, blocks)
            held[engine] -= blocks
        elif action == "clear":
            index.clear(engine)
            held[engine] = set()
        else:
            index.sweep(swept)
    runs = {
        engine: next((block for block in range(asked) if block + 1 not in blocks), asked)
        for engine, blocks in held.items()
    }
    assert index.match(chain(*range(1, asked + 1))) == {e: run for e, run in runs.items() if run}
    while not index.sweep():
        pass
    assert len(index) == len(set().union(*held.values()))


def test_a_partial_item_is_refused() -> None:
    table = PrefixTable(10)
    for call in (lambda: table.store(0, b"1234567"), lambda: table.match(bytes(33), [0])):
        with pytest.raises(ValueError, match="whole number"):
            call()
    with pytest.raises(ValueError, match="numbered"):
        table.store(MAX_ENGINES, b"")


def test_the_blocks_of_a_full_index_take_all_of_its_memory() -> None:
    index = PrefixIndex(1000)
    assert index.use == (0, 0, index.memory_bytes)
    index.stored(ENGINES[0], range(1, 501))
    assert index.use == (500, index.memory_bytes // 2, index.memory_bytes)
    index.stored(ENGINES[0], range(501, 5001))
    assert index.use == (1000, index.memory_bytes, index.memory_bytes)
