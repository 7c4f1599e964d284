"""Blocks that clients on the same host find and copy without asking the server."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import StoreUnavailable

BLOCK = 64 << 10
POOL_BLOCKS = 64
MANIFEST = manifest_of(BLOCK)
OK, MISSING = BlockStatus.OK, BlockStatus.MISSING
Connect = Callable[..., StoreClient]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """A node for 64 blocks that lets go what was used longest ago."""
    node = StoreServer(
        unix_path=str(tmp_path / "s.sock"), pool_bytes=POOL_BLOCKS * BLOCK, eviction="lru"
    )
    node.start()
    yield node
    node.stop()


def get(client: StoreClient, hashes: bytes, *, right: bool = True) -> list[BlockStatus]:
    """Read a chain; every block that is OK must have its own bytes."""
    blocks = len(hashes) // 32
    memory, wanted, span = Memory(blocks, BLOCK), Memory(blocks, BLOCK).holds(hashes), range(blocks)
    statuses = client.get_into(MANIFEST, 0, hashes, span, memory.segments, span)
    for k, status in enumerate(statuses):
        assert status != OK or not right or memory[k] == wanted[k]
    return statuses


def requests_of(server: StoreServer, *operations: str) -> int:
    stats = server.stats()
    return sum(stats[f"operation_ns.{name}.le_inf"] for name in operations)


def test_reads_and_matches_of_what_is_there_ask_the_server_nothing(
    server: StoreServer, client: StoreClient
) -> None:
    hashes = chain_of(5)
    put_chain(client, MANIFEST, hashes)
    for _ in range(3):
        assert get(client, hashes) == [OK] * 5
        assert client.match(MANIFEST, hashes).blocks == 5
    assert requests_of(server, "acquire", "release", "get", "match") == 0


def test_what_is_only_partly_there_is_asked_for(server: StoreServer, client: StoreClient) -> None:
    hashes = chain_of(5)
    put_chain(client, MANIFEST, hashes[: 3 * 32])
    assert get(client, hashes) == [OK] * 3 + [MISSING] * 2
    assert client.match(MANIFEST, hashes).blocks == 3
    assert requests_of(server, "acquire") == 1
    assert requests_of(server, "match") == 1


def test_reads_that_the_server_does_not_hear_of_count(
    server: StoreServer, client: StoreClient
) -> None:
    hashes = chain_of(4)
    put_chain(client, MANIFEST, hashes)
    get(client, hashes)
    client.match(MANIFEST, hashes)
    stats = server.stats()
    assert stats["hits_total.memory"] == 8
    assert stats["bytes_out_total.shm"] == 4 * BLOCK


def test_reads_that_the_server_does_not_hear_of_keep_a_block(client: StoreClient) -> None:
    chains = [chain_of(1, seed=str(number)) for number in range(POOL_BLOCKS)]
    for chain in chains:
        put_chain(client, MANIFEST, chain)
    assert get(client, chains[0]) == [OK]
    for number in range(POOL_BLOCKS // 2):
        put_chain(client, MANIFEST, chain_of(1, seed=f"more {number}"))
    assert get(client, chains[0]) == [OK]
    assert get(client, chains[1]) == [MISSING]


@pytest.mark.parametrize("how", ["delete", "purge"])
def test_what_went_is_not_found(client: StoreClient, connect: Connect, how: str) -> None:
    hashes = chain_of(4)
    put_chain(client, MANIFEST, hashes)
    other = connect("tcp")
    if how == "delete":
        other.delete(MANIFEST, hashes[32:64])
    else:
        other.purge()
    there = 1 if how == "delete" else 0
    assert get(client, hashes) == [OK] * there + [MISSING] * (4 - there)
    assert client.match(MANIFEST, hashes).blocks == there


def test_a_block_is_there_with_all_of_its_parts_or_not_at_all(client: StoreClient) -> None:
    two = manifest_of(BLOCK, parts=2)
    hashes, memory = chain_of(1), Memory(1, BLOCK).holds(chain_of(1))
    for part in range(2):
        assert client.match(two, hashes).blocks == 0
        got = client.get_into(two, 0, hashes, range(1), Memory(1, BLOCK).segments, [0])
        assert got == [MISSING]
        client.put(two, part, hashes, range(1), memory.segments, [0])
    assert client.match(two, hashes).blocks == 1
    assert client.get_into(two, 1, hashes, range(1), Memory(1, BLOCK).segments, [0]) == [OK]


def test_blocks_for_which_the_directory_has_no_room_are_read_all_the_same(tmp_path: Path) -> None:
    small = manifest_of(4096)
    node = StoreServer(unix_path=str(tmp_path / "t.sock"), pool_bytes=16 << 20, granule_bytes=4096)
    node.start()
    try:
        with StoreClient(f"kv://127.0.0.1:{node.port}", transport="shm") as client:
            hashes = chain_of(2000)
            put_chain(client, small, hashes)
            memory, span = Memory(2000, 4096), range(2000)
            got = client.get_into(small, 0, hashes, span, memory.segments, span)
            assert got == [OK] * 2000
            assert memory.data == Memory(2000, 4096).holds(hashes).data
            assert requests_of(node, "acquire") > 0
    finally:
        node.stop()


def test_reads_in_a_storm_of_evictions_never_give_other_bytes(connect: Connect) -> None:
    """Without digests, so that nothing but the directory can tell."""
    reader, writer = connect("shm", verify=False), connect("shm")
    chains = [chain_of(4, seed=str(number)) for number in range(POOL_BLOCKS)]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for chain in chains:
                put_chain(writer, MANIFEST, chain)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        there = 0
        for _ in range(20):
            there += sum(status == OK for chain in chains for status in get(reader, chain))
        assert there > 0
    finally:
        stop.set()
        thread.join()


def test_a_server_that_is_gone_is_noticed(server: StoreServer, client: StoreClient) -> None:
    hashes = chain_of(2)
    put_chain(client, MANIFEST, hashes)
    assert get(client, hashes) == [OK] * 2
    server.stop()
    with pytest.raises(StoreUnavailable):
        get(client, hashes)
