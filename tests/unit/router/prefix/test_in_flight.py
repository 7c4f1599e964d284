"""Which engines will hold which blocks, by the legs in flight."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrouter.engines.engine import Engine, Role
from kvrouter.http.server.limits import Limits
from kvrouter.prefix.in_flight import (
    LEAST_BLOCKS,
    MARK_BYTES,
    MOST_MARKS,
    InFlightPrefixes,
    marks_of,
)
from kvrouter_store.identity.chain import hash_tokens, root_hash

ENGINES = [Engine(f"e:{port}", Role.PREFILL) for port in (1, 2, 3)]


def chain(branch: int, blocks: int) -> bytes:
    """The hashes of a prompt; those of one branch begin alike, those of two differ from start."""
    return hash_tokens([branch] * (16 * blocks), 16, root=root_hash(None)).data


def test_nothing_is_expected_without_legs_in_flight() -> None:
    assert InFlightPrefixes(lambda: 5000).match(chain(0, 50)) == {}


def test_a_prompt_in_flight_is_expected_until_it_ends() -> None:
    expected = InFlightPrefixes(lambda: 5000)
    expected.add(ENGINES[0], marks_of(chain(0, 40)))
    assert expected.match(chain(0, 60)).keys() == {ENGINES[0]}
    assert expected.match(chain(1, 60)) == {}
    expected.remove(ENGINES[0], marks_of(chain(0, 40)))
    assert expected.match(chain(0, 60)) == {}
    assert len(expected) == 0


def test_marked_blocks_take_the_memory_that_is_told() -> None:
    expected = InFlightPrefixes(lambda: 5000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(5000):
            expected.add(ENGINES[0], [number.to_bytes(32)])
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    memory = expected.use
    assert memory.entries == 5000
    assert taken == pytest.approx(memory.bytes, rel=0.15)
    assert memory.max_bytes == 5000 * MOST_MARKS * MARK_BYTES


def test_the_longest_body_has_no_more_marks_than_the_bound_counts() -> None:
    blocks = Limits().body_bytes // len("1,") // 16
    assert len(marks_of(bytes(32 * blocks))) <= MOST_MARKS


def test_the_longest_prompt_of_an_engine_counts() -> None:
    expected = InFlightPrefixes(lambda: 5000)
    for engine, blocks in ((ENGINES[0], 40), (ENGINES[0], 9), (ENGINES[1], 9)):
        expected.add(engine, marks_of(chain(0, blocks)))
    assert expected.match(chain(0, 60))[ENGINES[1]] == 8
    assert expected.match(chain(0, 60))[ENGINES[0]] == 32


@given(under_way=st.integers(0, 300), asked=st.integers(0, 300))
def test_what_is_found_is_too_short_by_half_at_most(under_way: int, asked: int) -> None:
    expected = InFlightPrefixes(lambda: 5000)
    expected.add(ENGINES[0], marks_of(chain(0, under_way)))
    common, found = min(under_way, asked), expected.match(chain(0, asked)).get(ENGINES[0], 0)
    assert found <= common
    if common >= LEAST_BLOCKS:
        assert found > common / 2


class ExpectedMachine(RuleBasedStateMachine):
    """Whatever begins and ends: it is expected exactly while it is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.expected = InFlightPrefixes(lambda: 5000)
        self.legs: list[tuple[Engine, bytes]] = []

    @rule(engine=st.sampled_from(ENGINES), branch=st.integers(0, 2), blocks=st.integers(0, 60))
    def begin(self, engine: Engine, branch: int, blocks: int) -> None:
        self.legs.append((engine, chain(branch, blocks)))
        self.expected.add(engine, marks_of(self.legs[-1][1]))

    @precondition(lambda self: self.legs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        engine, hashes = self.legs.pop(data.draw(st.integers(0, len(self.legs) - 1)))
        self.expected.remove(engine, marks_of(hashes))

    @invariant()
    def engines_are_found_while_they_have_a_prompt_under_way(self) -> None:
        for branch in range(3):
            asked = chain(branch, 80)
            having = {
                engine
                for engine, hashes in self.legs
                if len(hashes) >= 32 * LEAST_BLOCKS and asked.startswith(hashes)
            }
            assert self.expected.match(asked).keys() == having

    @invariant()
    def nothing_is_left_behind(self) -> None:
        assert self.legs or not len(self.expected)


TestExpectedMachine = ExpectedMachine.TestCase
TestExpectedMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
