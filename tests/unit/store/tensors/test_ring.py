"""Slots of host memory: one owner each, and a bounded wait for one."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store.tensors.base import NoRoom
from kvrouter_store.tensors.staged import Ring

WAIT_S = 10.0


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=60))
def test_no_slot_has_two_owners_and_none_is_lost(slots: int, takes: list[bool]) -> None:
    ring, owned = Ring(slots), list[int]()
    for take in takes:
        if take and len(owned) < slots:
            owned.append(ring.acquire(0))
        elif owned and not take:
            ring.release(owned.pop(0))
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(slots))
    free = [ring.acquire(0) for _ in range(slots - len(owned))]
    assert sorted(owned + free) == list(range(slots))


def test_a_full_ring_lets_wait_until_the_deadline_and_no_longer() -> None:
    ring = Ring(1)
    ring.acquire(0)
    begun = time.monotonic()
    with pytest.raises(NoRoom, match=r"within 0.05 s"):
        ring.acquire(0.05)
    assert time.monotonic() - begun >= 0.05


def test_who_waits_gets_the_slot_that_is_given_back() -> None:
    ring, got = Ring(1), list[int]()
    slot = ring.acquire(0)
    waiter = threading.Thread(target=lambda: got.append(ring.acquire(WAIT_S)))
    waiter.start()
    ring.release(slot)
    waiter.join(WAIT_S)
    assert got == [slot]


def test_a_slot_that_comes_with_the_deadline_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wake-up went to the thread whose time was over: nobody else would be woken."""
    ring = Ring(1)
    slot = ring.acquire(0)

    class LateCondition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            ring.release(slot)
            return False

    monkeypatch.setattr(threading.Condition, "wait", LateCondition.wait)
    assert ring.acquire(0.01) == slot


def test_a_slot_is_given_back_once() -> None:
    ring = Ring(2)
    slot = ring.acquire(0)
    ring.release(slot)
    with pytest.raises(ValueError, match="given back twice"):
        ring.release(slot)


def test_a_ring_has_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        Ring(0)
