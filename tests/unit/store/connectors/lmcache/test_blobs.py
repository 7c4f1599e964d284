"""Objects of LMCache's size and order in a real node, which may go away."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, content_of, overwrite_stored
from tests.unit.store.connectors.lmcache.keys import FLOAT16, Key, chunk

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.lmcache.blobs import Blob, Blobs, runs_of
from kvrouter_store.connectors.lmcache.memory import ObjectMemory
from kvrouter_store.connectors.lmcache.names import Manifests, layout_of, name_of
from kvrouter_store.connectors.reach import Reach

if TYPE_CHECKING:
    from kvrouter_store.client.lease import Lease

BYTES = 16 << 10
LAYOUT = layout_of([(BYTES // 2,)], [FLOAT16])
OK, MISSING, CORRUPT = BlockStatus.OK, BlockStatus.MISSING, BlockStatus.CORRUPT
STORED, EXISTS = BlockStatus.STORED, BlockStatus.EXISTS
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


class Process:
    """One of several LMCache servers: its memory, and what it does with the store."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.reach = Reach(client, logging.getLogger("lmcache"))
        self.memory = Memory(32, BYTES)
        (self.start,) = self.memory.segments.bases
        memory = ObjectMemory(self.start, len(self.memory.data))
        self.blobs = Blobs(self.reach, memory, "lmcache/test")
        self.manifests = Manifests()
        self.leases: list[tuple[Lease, list[int]]] = []

    def of(self, numbers: range | list[int], **more: Any) -> list[Blob]:
        """The objects of these chunks: that of chunk k is k-th in memory."""
        keys = [Key(chunk(number), **more) for number in numbers]
        return [
            Blob(self.manifests.of(key, LAYOUT), name_of(key), self.start + number * BYTES)
            for key, number in zip(keys, numbers, strict=True)
        ]

    def put(self, numbers: range | list[int], **more: Any) -> list[BlockStatus]:
        blobs = self.of(numbers, **more)
        for number, blob in zip(numbers, blobs, strict=True):
            self.memory[number] = content_of(blob.name, BYTES)
        return self.blobs.put(blobs)

    def find(self, numbers: range | list[int], **more: Any) -> list[int]:
        return self.blobs.find(self.of(numbers, **more), lambda *held: self.leases.append(held))

    def get(self, numbers: range | list[int], **more: Any) -> list[BlockStatus]:
        """Load, and see that all that came is what was put."""
        blobs = self.of(numbers, **more)
        statuses = self.blobs.get(blobs)
        for number, blob, status in zip(numbers, blobs, statuses, strict=True):
            assert status is not OK or self.memory[number] == content_of(blob.name, BYTES)
        return statuses


@pytest.fixture
def start(connect: Callable[..., StoreClient]) -> Callable[..., Process]:
    """Makes processes of one node."""
    return lambda transport="auto": Process(connect(transport))


@pytest.fixture
def process(start: Callable[..., Process]) -> Process:
    return start()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[StoreServer]:
    """A node for eight objects that lets go what was used longest ago."""
    node = StoreServer(unix_path=str(tmp_path / "small"), pool_bytes=8 * BYTES, eviction="lru")
    node.start()
    yield node
    node.stop()


@TRANSPORTS
def test_what_one_process_put_another_finds_and_gets(
    start: Callable[..., Process], transport: str
) -> None:
    one, other = start(transport), start(transport)
    assert one.put(range(5)) == [STORED] * 5
    assert one.put(range(6)) == [*[EXISTS] * 5, STORED]
    assert other.find(range(8)) == [0, 1, 2, 3, 4, 5]
    assert other.get(range(8)) == [*[OK] * 6, MISSING, MISSING]


@TRANSPORTS
def test_objects_beyond_a_gap_are_found_and_got(
    start: Callable[..., Process], transport: str
) -> None:
    process = start(transport)
    process.put([1, 2, 5, 7])
    assert process.find(range(8)) == [1, 2, 5, 7]
    assert [places for _, places in process.leases] == [[1, 2], [5], [7]]
    assert process.get(range(8)) == [
        *[MISSING, OK, OK, MISSING],
        *[MISSING, OK, MISSING, OK],
    ]


def test_objects_of_several_manifests_in_one_task_keep_their_places(process: Process) -> None:
    mixed = [
        blob
        for pair in zip(process.of(range(3)), process.of(range(3), kv_rank=7), strict=True)
        for blob in pair
    ]
    assert [run.places for run in runs_of(mixed)] == [[0, 2, 4], [1, 3, 5]]
    process.put(range(3), kv_rank=7)
    assert process.blobs.find(mixed, lambda *_: None) == [1, 3, 5]


def test_what_another_salt_stored_is_not_found(process: Process) -> None:
    process.put(range(3), cache_salt="alice")
    assert process.find(range(3), cache_salt="bob") == []
    assert process.find(range(3)) == []
    assert process.find(range(3), cache_salt="alice") == [0, 1, 2]


@TRANSPORTS
def test_a_found_object_is_not_evicted_until_its_lease_is_released(
    small: StoreServer, connect: Callable[..., StoreClient], transport: str
) -> None:
    process = Process(
        StoreClient(f"kv://127.0.0.1:{small.port}", transport=transport)  # type: ignore[arg-type]
    )
    process.put(range(2))
    process.find(range(2))
    for number in range(2, 16):
        process.put([number])
    assert process.get(range(2)) == [OK, OK]
    for lease, _ in process.leases:
        assert lease.release()
    for number in range(16, 32):
        process.put([number])
    assert process.get(range(2)) == [MISSING, MISSING]
    assert small.stats()["leases"] == 0
    process.client.close()


def test_the_beginning_of_a_prompt_stays_as_long_as_its_end(small: StoreServer) -> None:
    process = Process(StoreClient(f"kv://127.0.0.1:{small.port}"))
    assert process.find(range(4)) == []  # as LMCache looks up before it stores
    process.put(range(4))
    for number in range(8, 12):
        process.put([number])
    process.get([3])  # the end was used last, the beginning longest ago
    process.put([12, 13])
    assert process.get(range(4)) == [OK] * 4
    process.client.close()


def test_objects_stored_in_an_order_that_no_prompt_has_are_not_kept_for_each_other(
    small: StoreServer,
) -> None:
    process = Process(StoreClient(f"kv://127.0.0.1:{small.port}"))
    process.put(range(8))
    process.get([1, 2, 3, 4, 5, 6, 7])
    process.put([8])
    assert process.get([0]) == [MISSING]
    process.client.close()


def test_a_corrupt_object_does_not_come_and_leaves_the_store(
    server: StoreServer, tmp_path: Path, process: Process
) -> None:
    process.put(range(3))
    (wrong,) = process.of([1])
    overwrite_stored(str(tmp_path / "s.sock"), wrong.manifest, wrong.name, bytes(BYTES))
    assert process.get(range(3)) == [OK, CORRUPT, OK]
    assert process.find(range(3)) == [0, 2]


@TRANSPORTS
def test_a_question_whether_objects_are_held_keeps_none_of_them(
    small: StoreServer, transport: str
) -> None:
    process = Process(
        StoreClient(f"kv://127.0.0.1:{small.port}", transport=transport)  # type: ignore[arg-type]
    )
    for number in range(8):
        process.put([number])
    assert process.blobs.held(process.of([0, 9, 1])) == [True, False, True]
    assert process.blobs.held(process.of([0])) == [True]
    process.put([8])
    assert process.blobs.held(process.of(range(9))) == [False, *[True] * 8]
    process.client.close()


def test_deleted_objects_are_gone(process: Process) -> None:
    process.put(range(3))
    assert process.blobs.delete(process.of([0, 2, 7]))
    assert process.find(range(3)) == [1]


def test_the_store_lists_what_a_process_keeps_in_it(server: StoreServer, process: Process) -> None:
    process.put(range(2))
    process.find(range(2), kv_rank=7)
    listed = process.client.manifests()
    assert {each.manifest for each in listed} == {
        blob.manifest for blob in process.of([0]) + process.of([0], kv_rank=7)
    }
    assert {each.engines for each in listed} == {("lmcache/test",)}


def test_without_a_store_nothing_is_there_and_with_it_all_is_again(
    server: StoreServer, process: Process
) -> None:
    process.put(range(3))
    port = server.port
    server.stop()
    assert process.find(range(3)) == []
    assert process.reach.away
    assert process.get(range(3)) == [MISSING] * 3
    assert process.put(range(3)) == [MISSING] * 3
    assert process.blobs.held(process.of(range(3))) is None
    assert not process.blobs.delete(process.of(range(3)))
    again = StoreServer(port=port, pool_bytes=1 << 20)
    again.start()
    assert eventually(process.reach.beat)
    assert process.blobs.held(process.of(range(3))) == [False] * 3
    assert process.put(range(3)) == [STORED] * 3
    assert process.find(range(3)) == [0, 1, 2]
    process.client.close()
    again.stop()
