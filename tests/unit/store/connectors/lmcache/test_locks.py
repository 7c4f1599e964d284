"""A lease lasts until all that it was taken for is unlocked, and not for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store.connectors.lmcache.locks import Locks


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def locks(clock: Clock) -> Locks[str, str]:
    return Locks(10.0, clock)


def test_a_lease_is_over_when_its_last_object_is_unlocked(locks: Locks[str, str]) -> None:
    locks.add("lease", "abc")
    assert locks.unlock("ca") == []
    assert "b" in locks
    assert "a" not in locks
    assert locks.unlock("b") == ["lease"]
    assert len(locks) == 0


def test_what_two_lookups_found_is_unlocked_twice(locks: Locks[str, str]) -> None:
    locks.add("first", "ab")
    locks.add("second", "bc")
    assert locks.unlock("ab") == ["first"]
    assert "b" in locks
    assert locks.unlock("bc") == ["second"]


def test_what_was_not_locked_can_be_unlocked(locks: Locks[str, str]) -> None:
    locks.add("lease", "a")
    assert locks.unlock("xyz") == []
    assert locks.unlock("aa") == ["lease"]
    assert "x" not in locks


def test_a_lease_that_nobody_unlocks_is_over_in_time(locks: Locks[str, str], clock: Clock) -> None:
    locks.add("old", "ab")
    clock.now_s = 6.0
    locks.add("young", "bc")
    assert locks.take_expired() == []
    locks.unlock("a")
    clock.now_s = 10.0
    assert locks.take_expired() == ["old"]
    assert locks.expired == 1
    assert locks.take_expired() == []
    assert locks.unlock("bc") == ["young"]


@given(st.lists(st.one_of(st.lists(st.integers(0, 5), min_size=1), st.integers(0, 5))))
def test_a_locked_object_always_has_a_lease_that_is_not_over(
    steps: list[list[int] | int],
) -> None:
    """Leases are numbers of steps. A list locks these objects, a number unlocks one."""
    locks: Locks[int, int] = Locks(10.0, Clock())
    held: dict[int, list[int]] = {}
    locked = [0] * 6
    for number, step in enumerate(steps):
        if isinstance(step, list):
            locks.add(number, step)
            held[number] = step
            for key in step:
                locked[key] += 1
            continue
        for over in locks.unlock([step]):
            del held[over]
        locked[step] = max(0, locked[step] - 1)
        assert [key in locks for key in range(6)] == [count > 0 for count in locked]
        for key in range(6):
            assert not locked[key] or any(key in keys for keys in held.values())
    assert len(locks) == len(held)
