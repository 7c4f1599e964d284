"""How lists are posted and waited for, on verbs that complete them when the test says so."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.verbs import FakeDevice, FakeVerbs

from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import DeadlineExceeded
from kvrouter_store.rdma.base import Copy, TransferFailed
from kvrouter_store.rdma.queue_pair import LIST_LENGTH, LISTS_POSTED, lists_of

SOON_S = 0.05
PATIENCE_S = 20.0


def blocks(number: int, length: int = 65536) -> list[Copy]:
    return [Copy(1 + place * length, 7, 1 << 40, 9, length) for place in range(number)]


@pytest.fixture
def control() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 7), st.integers(1, 2000))
def test_lists_hold_the_same_bytes_in_the_same_order_within_both_limits(
    lengths: list[int], size: int, longest: int
) -> None:
    copies = [Copy(10_000 * at, 1, 90_000 * at, 2, length) for at, length in enumerate(lengths)]
    lists = list(lists_of(copies, size, longest))
    assert all(1 <= len(some) <= size for some in lists)
    pieces = [piece for some in lists for piece in some]
    assert all(1 <= piece.length <= longest for piece in pieces)
    flat = [
        (piece.local_address + at, piece.remote_address + at)
        for piece in pieces
        for at in (0, piece.length - 1)
    ]
    assert flat == sorted(flat)
    assert sum(piece.length for piece in pieces) == sum(lengths)


@pytest.mark.parametrize("length", [0, -1])
def test_a_copy_of_no_bytes_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        list(lists_of([*blocks(1), Copy(1, 1, 1, 1, length)], 4, 4096))


def test_each_list_asks_for_one_completion(control: tuple[socket.socket, socket.socket]) -> None:
    verbs = FakeVerbs()
    pair = FakeDevice(verbs).queue_pair()
    pair.write(blocks(2 * LIST_LENGTH + 1), Deadline(PATIENCE_S), control[0].fileno())
    pair.read(blocks(3), Deadline(PATIENCE_S), control[0].fileno())
    assert [len(some.copies) for some in verbs.posted] == [LIST_LENGTH, LIST_LENGTH, 1, 3]
    assert [some.opcode for some in verbs.posted] == [verbs.WRITE] * 3 + [verbs.READ]
    assert [some.tag for some in verbs.posted] == [1, 2, 3, 4]
    assert (pair.work_requests, pair.signalled_completions) == (2 * LIST_LENGTH + 4, 4)
    assert pair.posted_bytes == (2 * LIST_LENGTH + 4) * 65536


def test_no_more_lists_are_under_way_than_the_queue_has_room_for(
    control: tuple[socket.socket, socket.socket],
) -> None:
    verbs = FakeVerbs(at_once=False)
    pair = FakeDevice(verbs).queue_pair()
    lists = 3 * LISTS_POSTED
    many = blocks(lists * LIST_LENGTH)
    work = threading.Thread(
        target=pair.write, args=(many, Deadline(PATIENCE_S), control[0].fileno())
    )
    work.start()
    completed = 0
    while completed < lists:
        if verbs.under_way:
            verbs.complete()
            completed += 1
        else:
            os.sched_yield()
    work.join()
    assert verbs.most_under_way == LISTS_POSTED
    assert len(verbs.posted) == lists


def test_the_first_failure_is_told_and_everything_is_flushed(
    control: tuple[socket.socket, socket.socket],
) -> None:
    verbs = FakeVerbs(at_once=False)
    pair = FakeDevice(verbs).queue_pair()
    failing = threading.Thread(target=lambda: complete_when_posted(verbs, 10))
    failing.start()
    with pytest.raises(TransferFailed, match="REM_ACCESS_ERR") as failed:
        pair.write(blocks(2 * LIST_LENGTH), Deadline(PATIENCE_S), control[0].fileno())
    failing.join()
    assert failed.value.status == "REM_ACCESS_ERR"
    assert verbs.states == [verbs.STATE_ERROR, verbs.STATE_RESET]
    assert verbs.under_way == []


def complete_when_posted(verbs: FakeVerbs, status: int) -> None:
    while len(verbs.posted) < 2:
        os.sched_yield()
    verbs.complete(status)


def test_a_deadline_fences_before_it_is_told(
    control: tuple[socket.socket, socket.socket],
) -> None:
    verbs = FakeVerbs(at_once=False)
    pair = FakeDevice(verbs).queue_pair()
    with pytest.raises(DeadlineExceeded):
        pair.read(blocks(1), Deadline(SOON_S), control[0].fileno())
    assert verbs.states == [verbs.STATE_ERROR, verbs.STATE_RESET]
    with pytest.raises(TransferFailed, match="failed before"):
        pair.read(blocks(1), Deadline(PATIENCE_S), control[0].fileno())


def test_a_hang_up_of_the_control_channel_ends_the_wait(
    control: tuple[socket.socket, socket.socket],
) -> None:
    verbs = FakeVerbs(at_once=False)
    pair = FakeDevice(verbs).queue_pair()
    control[1].close()
    with pytest.raises(TransferFailed) as failed:
        pair.write(blocks(1), Deadline(PATIENCE_S), control[0].fileno())
    assert failed.value.status == TransferFailed.CUT


def test_what_is_on_its_way_on_the_control_channel_is_no_hang_up(
    control: tuple[socket.socket, socket.socket],
) -> None:
    verbs = FakeVerbs(at_once=False)
    pair = FakeDevice(verbs).queue_pair()
    control[1].sendall(b"a reply that nobody has read yet")
    with pytest.raises(DeadlineExceeded):
        pair.write(blocks(1), Deadline(SOON_S), control[0].fileno())


def test_a_queue_that_takes_no_work_is_a_failure(
    control: tuple[socket.socket, socket.socket],
) -> None:
    verbs = FakeVerbs()
    pair = FakeDevice(verbs).queue_pair()
    verbs.refuses_work = True
    with pytest.raises(TransferFailed, match="takes no work"):
        pair.write(blocks(1), Deadline(PATIENCE_S), control[0].fileno())
    assert pair.work_requests == 0


def test_a_queue_pair_closes_once_and_tells_its_device() -> None:
    verbs = FakeVerbs()
    device = FakeDevice(verbs)
    pair = device.queue_pair()
    pair.close()
    pair.close()
    assert verbs.states == [verbs.STATE_ERROR, verbs.STATE_RESET]
    assert len(verbs.closed) == 4
    assert device.gone == [pair]
