"""Layers go to the store while later ones are computed; a block is there when all of them are."""

import threading
import weakref
from collections.abc import Sequence

import pytest
from tests.fakes.patience import eventually
from tests.torch.caches import LAYERS, WAIT_S, contiguous, linked, put_all, some

from kvrouter_store._core import BlockStatus, Segments, StoreServer
from kvrouter_store.client.results import PutResult
from kvrouter_store.errors import DeadlineExceeded, StoreClosed
from kvrouter_store.tensors.client import Blocks, TensorClient
from kvrouter_store.tensors.host import HostCopier

pytestmark = pytest.mark.torch


class WatchedLink:
    """Remembers which layers came, and stores them when it is let go."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.arrived = threading.Semaphore(0)
        self.free = threading.Event()
        self.free.set()
        self.statuses: dict[int, list[BlockStatus] | None] = {}
        self.failure: Exception | None = None

    def put(
        self, part: int, hashes: bytes, span: range, segments: Segments, indices: Sequence[int]
    ) -> PutResult | None:
        self.came.append(part)
        self.arrived.release()
        assert self.free.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        statuses = self.statuses.get(part, [BlockStatus.STORED] * len(span))
        return None if statuses is None else PutResult(tuple(statuses))

    def get_into(
        self, part: int, hashes: bytes, span: range, segments: Segments, indices: Sequence[int]
    ) -> list[BlockStatus]:
        return self.statuses.get(part) or [BlockStatus.OK] * len(span)


def four() -> Blocks:
    return some(contiguous(4), range(4))


def test_early_layers_are_in_the_store_before_the_last_one_is_computed(node: StoreServer) -> None:
    blocks = four()
    with linked(f"kv://127.0.0.1:{node.port}", blocks.layers) as link:
        link.beat()
        with TensorClient(link, HostCopier()) as client, client.put_tensors(blocks) as put:
            for layer in range(LAYERS - 1):
                put.layer(layer)
            until_stored(node, blocks=4)
            assert link.match(blocks.hashes) == 0  # not whole yet
            put.layer(LAYERS - 1)
            assert put.finish() == 4
            assert link.match(blocks.hashes) == 4


def until_stored(node: StoreServer, blocks: int) -> None:
    """Until all but the last layer are there, by the bytes that came."""
    enough = blocks * (LAYERS - 1) * four().layers[0].block_bytes
    deadline = threading.Event()
    timer = threading.Timer(WAIT_S, deadline.set)
    timer.start()
    while node.stats()["bytes_in_total"] < enough:
        assert not deadline.is_set(), node.stats()
    timer.cancel()


def test_the_caller_goes_on_while_a_layer_is_stored() -> None:
    link = WatchedLink()
    link.free.clear()
    with TensorClient(link, HostCopier()) as client, client.put_tensors(four()) as put:
        for layer in range(LAYERS):
            put.layer(layer)
        assert link.arrived.acquire(timeout=WAIT_S)
        assert link.came == [0]
        link.free.set()
        assert put.finish() == 4
    assert link.came == [0, 1, 2]


@pytest.mark.parametrize(
    ("statuses", "stored"),
    [
        ({}, 4),
        ({1: [BlockStatus.EXISTS, BlockStatus.BUSY, BlockStatus.STORED, BlockStatus.EXISTS]}, 4),
        (
            {1: [BlockStatus.STORED, BlockStatus.NO_SPACE, *[BlockStatus.STORED] * 2]},
            1,
        ),
        ({0: None}, 0),
        ({2: [BlockStatus.CORRUPT] * 4}, 0),
    ],
)
def test_a_block_counts_when_every_layer_of_it_is_stored(
    statuses: dict[int, list[BlockStatus] | None], stored: int
) -> None:
    link = WatchedLink()
    link.statuses = statuses
    with TensorClient(link, HostCopier()) as client:
        assert put_all(client, four()) == stored


def test_without_one_of_the_layers_no_block_counts() -> None:
    with TensorClient(WatchedLink(), HostCopier()) as client, client.put_tensors(four()) as put:
        put.layer(0)
        put.layer(2)
        assert put.finish() == 0


def test_a_client_without_work_keeps_no_tensors_alive() -> None:
    with TensorClient(WatchedLink(), HostCopier()) as client:
        blocks = four()
        kept = weakref.ref(blocks.layers[0])
        assert put_all(client, blocks) == 4
        del blocks
        assert eventually(lambda: kept() is None)


def test_a_load_ends_before_the_first_block_that_some_layer_lacks() -> None:
    link = WatchedLink()
    link.statuses[1] = [BlockStatus.OK, BlockStatus.OK, BlockStatus.CORRUPT, BlockStatus.OK]
    link.statuses[2] = [BlockStatus.OK, BlockStatus.MISSING]
    with TensorClient(link, HostCopier()) as client:
        assert client.get_tensors_into(four()) == 1


class MeetingLink(WatchedLink):
    """Reads a layer when all others are being read too; the first one fails, if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting = threading.Barrier(LAYERS, timeout=WAIT_S)
        self.read: list[int] = []

    def get_into(
        self, part: int, hashes: bytes, span: range, segments: Segments, indices: Sequence[int]
    ) -> list[BlockStatus]:
        self.meeting.wait()
        if self.failure is not None and part == 0:
            raise self.failure
        assert self.free.wait(WAIT_S)
        self.read.append(part)
        return [BlockStatus.OK] * len(span)


def test_several_layers_are_read_at_a_time() -> None:
    link = MeetingLink()
    with TensorClient(link, HostCopier()) as client:
        assert client.get_tensors_into(four()) == 4


def test_a_load_that_fails_ends_when_nothing_writes_to_the_tensors_any_more() -> None:
    link = MeetingLink()
    link.failure = ValueError("part 0 has 1 bytes per block")
    link.free.clear()
    threading.Timer(0.05, link.free.set).start()
    with TensorClient(link, HostCopier()) as client:
        with pytest.raises(ValueError, match="part 0 has 1 bytes"):
            client.get_tensors_into(four())
        assert sorted(link.read) == [1, 2]


def test_a_computation_that_fails_puts_nothing_more() -> None:
    link = WatchedLink()
    link.free.clear()

    def compute(client: TensorClient) -> None:
        with client.put_tensors(four()) as put:
            put.layer(0)
            put.layer(1)
            assert link.arrived.acquire(timeout=WAIT_S)
            threading.Timer(0.05, link.free.set).start()
            raise RuntimeError("out of memory")

    with (
        TensorClient(link, HostCopier()) as client,
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        compute(client)
    assert link.came == [0]


def test_the_end_of_a_put_waits_until_nothing_reads_the_tensors() -> None:
    link, ended = WatchedLink(), threading.Event()
    link.free.clear()

    def compute(client: TensorClient) -> None:
        with client.put_tensors(four()) as put:
            put.layer(0)
        ended.set()

    with TensorClient(link, HostCopier()) as client:
        thread = threading.Thread(target=compute, args=(client,))
        thread.start()
        assert link.arrived.acquire(timeout=WAIT_S)
        assert not ended.wait(0.05)
        link.free.set()
        assert ended.wait(WAIT_S)
        thread.join(WAIT_S)


def test_a_store_that_never_answers_ends_the_wait() -> None:
    link = WatchedLink()
    link.free.clear()
    with TensorClient(link, HostCopier(), deadline_s=0.05) as client:
        put = client.put_tensors(four())
        put.layer(0)
        with pytest.raises(DeadlineExceeded, match="did not come to an end"):
            put.finish()
        link.free.set()


def test_what_goes_wrong_in_the_thread_is_raised_where_the_put_ends() -> None:
    link = WatchedLink()
    link.failure = ValueError("part 0 has 1 bytes per block")
    with TensorClient(link, HostCopier()) as client:
        put = client.put_tensors(four())
        put.layer(0)
        with pytest.raises(ValueError, match="part 0 has 1 bytes"):
            put.finish()


def test_a_dead_store_costs_no_more_than_its_deadline_and_fails_nothing(node: StoreServer) -> None:
    blocks = four()
    with linked(f"kv://127.0.0.1:{node.port}", blocks.layers) as link:
        link.beat()
        with TensorClient(link, HostCopier()) as client:
            with client.put_tensors(blocks) as put:
                put.layer(0)
                node.stop()
                put.layer(1)
                put.layer(2)
                assert put.finish() < 4
            assert client.get_tensors_into(blocks) == 0


def test_a_closed_client_begins_nothing() -> None:
    client = TensorClient(WatchedLink(), HostCopier())
    put = client.put_tensors(four())
    client.close()
    client.close()
    with pytest.raises(StoreClosed):
        client.put_tensors(four())
    with pytest.raises(StoreClosed):
        put.layer(0)


def test_blocks_need_a_place_and_a_name_each() -> None:
    with pytest.raises(ValueError, match="as many indices"):
        Blocks(contiguous(2), [0], b"\0" * 64, range(2))
    with pytest.raises(ValueError, match="hashes from block 0 on"):
        Blocks(contiguous(2), [0, 1], b"\0" * 32, range(2))
