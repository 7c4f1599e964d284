"""One-sided copies over a real device: on one machine, and between two."""

import os
import select
import socket
import time
import zlib
from dataclasses import replace
from typing import cast

import pytest
from tests.rdma.near import LARGE, SIZE, NearSide
from tests.rdma.rig import MIB, Control, Memory

from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import DeadlineExceeded
from kvrouter_store.rdma.base import Device, LinkType, TransferFailed
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.options import RdmaOptions
from kvrouter_store.rdma.queue_pair import LIST_LENGTH, LISTS_POSTED, VerbsQueuePair

pytestmark = pytest.mark.rdma
KIB = 1024
BLOCK = 64 * KIB
# A dead or silent peer is noticed within half a second; an emulated machine takes its own time.
NOTICED_S = 20.0


def pattern(length: int) -> bytes:
    """Bytes that differ from block to block, and have no zero."""
    seed = bytes(1 + (place * 7 + place // 251) % 255 for place in range(4096))
    return b"".join(
        bytes([1 + place % 255]) + seed[1:] for place in range(-(-length // len(seed)))
    )[:length]


def test_what_is_written_arrives_and_is_read_back(near: NearSide) -> None:
    near.memory.bytes[:MIB] = pattern(MIB)
    near.write(*near.blocks(16, BLOCK))
    for place in range(16):
        there = (15 - place) * BLOCK
        assert near.far_digest(there, BLOCK) == near.memory.digest(place * BLOCK, BLOCK)
    near.memory.bytes[:MIB] = bytes(MIB)
    near.read(*near.blocks(16, BLOCK))
    assert near.memory.bytes[:MIB] == pattern(MIB)


def test_nothing_beside_the_copies_is_written(near: NearSide) -> None:
    near.memory.bytes[:] = b"\x55" * SIZE
    near.control.ask("fill", data="aa")
    near.write(near.memory.copy(near.region, 1, there=4095), near.memory.copy(near.region, 3))
    near.read(near.memory.copy(near.region, 5, here=MIB + 1, there=MIB))
    expected = bytearray(b"\xaa" * 8192)
    expected[:3] = b"\x55" * 3
    expected[4095] = 0x55
    assert near.far_digest(0, 8192) == zlib.crc32(expected)
    assert near.memory.bytes[MIB : MIB + 8] == b"\x55" + b"\xaa" * 5 + b"\x55" * 2


def test_a_list_longer_than_the_queue_goes_in_chunks_with_one_completion_each(
    near: NearSide,
) -> None:
    number = LIST_LENGTH * LISTS_POSTED * 2 + 5
    length = 1024
    near.memory.bytes[: number * length] = pattern(number * length)
    near.write(*near.blocks(number, length))
    assert near.queue_pair.work_requests == number
    assert near.queue_pair.signalled_completions == -(-number // LIST_LENGTH)
    assert near.queue_pair.posted_bytes == number * length
    before = near.memory.bytes[: number * length]
    near.memory.bytes[: number * length] = bytes(number * length)
    near.read(*near.blocks(number, length))
    assert near.memory.bytes[: number * length] == before


def test_a_copy_longer_than_a_message_may_be_is_cut(large: NearSide) -> None:
    length = 9 * MIB
    large.memory.bytes[:length] = pattern(length)
    large.write(large.memory.copy(large.region, length))
    assert large.queue_pair.work_requests == 2
    assert large.far_digest(0, length) == large.memory.digest(0, length)


def test_a_list_of_nothing_is_done_at_once(near: NearSide) -> None:
    near.write()
    near.read()
    assert near.queue_pair.work_requests == 0


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_wrong_rkey_is_refused_by_the_peer_and_the_queue_pair_is_of_no_more_use(
    near: NearSide, call: str
) -> None:
    good = near.memory.copy(near.region, BLOCK)
    with pytest.raises(TransferFailed, match="REM_ACCESS_ERR") as failed:
        getattr(near, call)(good, good._replace(rkey=near.region.rkey ^ 0x5500), good)
    assert failed.value.status == "REM_ACCESS_ERR"
    with pytest.raises(TransferFailed, match="failed before"):
        near.write(good)


@pytest.mark.parametrize("call", ["write", "read"])
def test_an_address_past_the_region_is_refused_and_touches_nothing(
    near: NearSide, call: str
) -> None:
    near.memory.bytes[:] = b"\x11" * SIZE
    past = near.memory.copy(near.region, BLOCK, there=SIZE - BLOCK + 1)
    with pytest.raises(TransferFailed) as failed:
        getattr(near, call)(past)
    assert failed.value.status == "REM_ACCESS_ERR"
    assert near.memory.bytes[:BLOCK] == b"\x11" * BLOCK
    assert not near.control.ask("holds", value=0x11)["found"]


def test_local_memory_that_was_not_registered_is_not_read(near: NearSide) -> None:
    stray = near.memory.copy(near.region, BLOCK)._replace(local_address=near.memory.address + SIZE)
    with pytest.raises(TransferFailed) as failed:
        near.write(stray)
    assert failed.value.status == "LOC_PROT_ERR"


def test_memory_not_registered_as_remote_is_not_open_to_the_peer(
    device: Device, control: Control
) -> None:
    side = NearSide(device, control, remote=False)
    with pytest.raises(TransferFailed, match="REM_ACCESS_ERR"):
        side.write(side.memory.copy(side.region, BLOCK))
    side.close()


def test_memory_that_the_peer_gave_back_is_not_written_any_more(near: NearSide) -> None:
    near.write(near.memory.copy(near.region, BLOCK))
    near.control.ask("unregister")
    near.memory.bytes[:BLOCK] = b"\x33" * BLOCK
    with pytest.raises(TransferFailed, match="REM_ACCESS_ERR"):
        near.write(near.memory.copy(near.region, BLOCK))
    assert not near.control.ask("holds", value=0x33)["found"]


def test_a_peer_killed_amid_a_transfer_is_noticed_in_bounded_time(large: NearSide) -> None:
    large.memory.bytes[:] = b"\x77" * LARGE
    large.control.ask("die_when", offset=LARGE - BLOCK)
    started = time.monotonic()
    with pytest.raises(TransferFailed) as failed:
        large.write(*large.blocks(LARGE // BLOCK, BLOCK))
    assert failed.value.status in {TransferFailed.CUT, "RETRY_EXC_ERR", "REM_OP_ERR"}
    assert time.monotonic() - started < NOTICED_S


def test_a_silent_peer_is_given_up_after_its_retries(near: NearSide) -> None:
    near.control.ask("fence")
    started = time.monotonic()
    with pytest.raises(TransferFailed) as failed:
        near.write(near.memory.copy(near.region, BLOCK), cut=near.never_cut)
    assert failed.value.status == "RETRY_EXC_ERR"
    assert time.monotonic() - started < NOTICED_S


def test_a_cut_control_channel_ends_a_transfer_to_a_silent_peer(near: NearSide) -> None:
    near.control.ask("fence")
    near.control.link.shutdown(socket.SHUT_RDWR)
    with pytest.raises(TransferFailed) as failed:
        near.write(near.memory.copy(near.region, BLOCK))
    assert failed.value.status == TransferFailed.CUT


def test_a_silent_peer_does_not_hold_a_transfer_past_its_deadline(near: NearSide) -> None:
    near.control.ask("fence")
    with pytest.raises(DeadlineExceeded):
        near.write(near.memory.copy(near.region, BLOCK), deadline_s=0.01, cut=near.never_cut)


def test_after_a_missed_deadline_the_memory_is_not_read_any_more(large: NearSide) -> None:
    large.memory.bytes[:] = b"\x22" * LARGE
    with pytest.raises(DeadlineExceeded):
        large.write(*large.blocks(LARGE // BLOCK, BLOCK), deadline_s=0.02)
    large.memory.bytes[:] = b"\xee" * LARGE
    large.control.ask("fence")
    assert not large.control.ask("holds", value=0xEE)["found"]


def test_nothing_is_written_after_the_written_side_was_fenced(large: NearSide) -> None:
    large.memory.bytes[:] = b"\x44" * LARGE
    large.control.ask("fence_when", offset=LARGE - BLOCK)
    with pytest.raises(TransferFailed):
        large.write(*large.blocks(LARGE // BLOCK, BLOCK), cut=large.never_cut)
    fenced = large.control.receive()
    assert large.far_digest() == fenced["crc"]
    assert fenced["crc"] != large.memory.digest()


def test_after_a_failure_a_new_queue_pair_does_the_work(
    near: NearSide, device: Device, peer: tuple[str, int]
) -> None:
    wrong = near.memory.copy(near.region, BLOCK)._replace(rkey=0)
    with pytest.raises(TransferFailed):
        near.write(wrong)
    again = NearSide(device, Control(socket.create_connection(peer)))
    again.memory.bytes[:BLOCK] = pattern(BLOCK)
    again.write(again.memory.copy(again.region, BLOCK))
    assert again.far_digest(0, BLOCK) == zlib.crc32(pattern(BLOCK))
    again.close()
    again.control.close()


def test_a_queue_pair_can_be_fenced_and_closed_twice(near: NearSide) -> None:
    near.queue_pair.fence()
    near.queue_pair.fence()
    near.queue_pair.close()
    near.queue_pair.close()
    with pytest.raises(TransferFailed):
        near.write(near.memory.copy(near.region, BLOCK))


def test_ranks_copy_over_their_own_device_and_gid(device: Device) -> None:
    options = RdmaOptions(dev_name="rxe0:1,rxe1:1", link_type="Ethernet")
    joined, alone = open_device(options, rail=2), open_device(options, rail=3)
    assert (joined.name, alone.name) == ("rxe0", "rxe1")
    memory = Memory(MIB, alone, remote=True)
    memory.bytes[:BLOCK] = pattern(BLOCK)
    ours, theirs = alone.queue_pair(), alone.queue_pair()
    ours.connect(theirs.endpoint)
    theirs.connect(ours.endpoint)
    here, there = socket.socketpair()
    with here, there:
        ours.write([memory.copy(memory.region, BLOCK, there=BLOCK)], Deadline(60), here.fileno())
    assert memory.bytes[BLOCK : 2 * BLOCK] == pattern(BLOCK)
    for opened in (alone, joined):
        opened.close()
    memory.close()


def test_a_peer_on_another_type_of_link_is_refused(device: Device) -> None:
    queue_pair = device.queue_pair()
    peer = replace(queue_pair.endpoint, link_type=LinkType.INFINIBAND)
    with pytest.raises(TransferFailed, match="type"):
        queue_pair.connect(peer)
    queue_pair.close()


def test_a_peer_that_nobody_is_cannot_be_reached(device: Device) -> None:
    queue_pair = device.queue_pair()
    nobody = bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 99])
    started = time.monotonic()
    with pytest.raises(TransferFailed, match="does not reach"):
        queue_pair.connect(replace(queue_pair.endpoint, gid=nobody))
    assert time.monotonic() - started < NOTICED_S
    queue_pair.close()


def test_a_closed_device_has_closed_what_was_made_of_it() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    device = open_device(RdmaOptions())
    memory = Memory(MIB, device)
    queue_pairs = [device.queue_pair() for _ in range(20)]
    device.close()
    device.close()
    for queue_pair in queue_pairs:
        queue_pair.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_each_queue_pair_waits_on_a_descriptor_of_its_own(device: Device) -> None:
    pairs = [cast("VerbsQueuePair", device.queue_pair()) for _ in range(3)]
    waits = select.poll()
    for pair in pairs:
        waits.register(pair.descriptor, select.POLLIN)
    assert len({pair.descriptor for pair in pairs}) == 3
    assert waits.poll(0) == []
    for pair in pairs:
        pair.close()


def test_a_limit_on_locked_memory_is_named_with_its_remedy(control: Control) -> None:
    problem = control.ask("register_as_nobody", limit=MIB, size=4 * MIB)["problem"]
    assert "does not register 4194304 bytes" in problem
    assert "may lock 1048576" in problem
    assert "ulimit -l" in problem


def test_no_memory_is_registered_where_there_is_none(device: Device) -> None:
    with pytest.raises(ValueError, match="no memory"):
        device.register(0, 4096, remote=False)


def test_pyverbs_sets_up_no_logging_of_the_process(control: Control) -> None:
    assert control.ask("logging_handlers")["number"] == 0
