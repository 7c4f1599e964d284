"""Leases that clients on the same host take by pinning blocks, without asking the server."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, chain_of, content_of, manifest_of, put_chain

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient

BLOCK = 16 << 10
POOL_BLOCKS = 64
MANIFEST = manifest_of(BLOCK)
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


def fill(client: StoreClient, name: str, blocks: int = POOL_BLOCKS) -> None:
    for number in range(blocks):
        put_chain(client, MANIFEST, chain_of(1, seed=f"{name} {number}"))


def asked(server: StoreServer) -> int:
    stats = server.stats()
    return stats["operation_ns.acquire.le_inf"] + stats["operation_ns.release.le_inf"]


def test_a_lease_on_what_is_there_asks_the_server_nothing(
    server: StoreServer, client: StoreClient
) -> None:
    hashes = chain_of(3)
    put_chain(client, MANIFEST, hashes)
    with client.acquire(MANIFEST, hashes, 0) as lease:
        assert lease.blocks == 3
        assert lease.view(2) == content_of(hashes[64:], BLOCK)
        stats = server.stats()
        assert (stats["leases"], stats["leased_blocks"]) == (1, 3)
        assert stats["hits_total.memory"] == 3
    assert lease.release() is False
    stats = server.stats()
    assert (stats["leases"], stats["leased_blocks"], stats["pinned_blocks"]) == (0, 0, 0)
    assert asked(server) == 0


def test_a_leased_block_and_what_leads_to_it_are_not_evicted(
    server: StoreServer, client: StoreClient
) -> None:
    hashes = chain_of(4)
    put_chain(client, MANIFEST, hashes)
    with client.acquire(MANIFEST, hashes) as lease:
        fill(client, "more", 2 * POOL_BLOCKS)
        assert client.match(MANIFEST, hashes).blocks == 4
        for k in range(4):
            assert lease.view(k) == content_of(hashes[32 * k : 32 * k + 32], BLOCK)
    assert asked(server) == 0
    fill(client, "yet more", 2 * POOL_BLOCKS)
    assert client.match(MANIFEST, hashes).blocks == 0
    assert server.stats()["pinned_blocks"] == 0


@pytest.mark.parametrize("how", ["delete", "purge"])
def test_a_leased_block_that_was_deleted_is_readable_until_the_release(
    server: StoreServer, client: StoreClient, how: str
) -> None:
    hashes = chain_of(2)
    put_chain(client, MANIFEST, hashes)
    lease = client.acquire(MANIFEST, hashes)
    assert (client.delete(MANIFEST, hashes) if how == "delete" else client.purge()) == 2
    assert client.match(MANIFEST, hashes).blocks == 0
    fill(client, "over it", POOL_BLOCKS)
    assert lease.view(1) == content_of(hashes[32:], BLOCK)
    assert server.stats()["pinned_blocks"] == 2
    assert lease.release() is True
    assert server.stats()["pinned_blocks"] == 0
    client.purge()
    assert server.stats()["free_bytes"] == server.stats()["pool_bytes"]


def test_what_a_client_had_leased_goes_with_it(
    server: StoreServer, client: StoreClient, connect: Connect
) -> None:
    hashes = chain_of(2)
    put_chain(client, MANIFEST, hashes)
    lease = client.acquire(MANIFEST, hashes)
    client.close()
    assert eventually(lambda: server.stats()["leases"] == 0)
    assert lease.release() is False
    other = connect()
    fill(other, "more", 2 * POOL_BLOCKS)
    assert other.match(MANIFEST, hashes).blocks == 0


def test_a_lease_whose_connection_is_busy_is_released_later(
    server: StoreServer, connect: Connect
) -> None:
    client = connect("tcp", deadline_s=0.2)
    hashes = chain_of(2)
    put_chain(client, MANIFEST, hashes)
    lease = client.acquire(MANIFEST, hashes)
    (channel,) = client.channels()
    with channel.lock:  # as a long transfer holds it
        assert lease.release() is False
        assert not lease.over
    assert server.stats()["leases"] == 1
    assert lease.release() is True
    assert lease.over
    assert server.stats()["leases"] == 0


def test_a_lease_is_on_all_parts_or_on_the_one_asked_for(
    server: StoreServer, client: StoreClient
) -> None:
    two, hashes = manifest_of(BLOCK, parts=2), chain_of(2)
    memory = Memory(2, BLOCK).holds(hashes)
    client.put(two, 0, hashes, range(2), memory.segments, range(2))
    assert client.acquire(two, hashes).blocks == 0
    client.put(two, 1, hashes, range(2), memory.segments, range(2))
    with client.acquire(two, hashes) as every, client.acquire(two, hashes, 1) as one:
        assert every.view(1, 1) == every.view(1, 0) == one.view(1, 1) == memory[1]
        assert server.stats()["leased_blocks"] == 4


def test_more_blocks_than_there_are_pins_for_are_leased_by_the_server(tmp_path: Path) -> None:
    node = StoreServer(unix_path=str(tmp_path / "t.sock"), pool_bytes=32 << 20)
    node.start()
    try:
        with StoreClient(f"kv://127.0.0.1:{node.port}", transport="shm") as client:
            hashes = chain_of(600)
            put_chain(client, MANIFEST, hashes)
            with client.acquire(MANIFEST, hashes) as lease:
                assert lease.blocks == 600
                assert asked(node) == 1
                assert node.stats()["leased_blocks"] == 600
            assert node.stats()["leased_blocks"] == 0
            leases = [client.acquire(MANIFEST, hashes[: 32 * 256]) for _ in range(3)]
            assert asked(node) == 3
            assert node.stats()["leases"] == 3
            for one in leases:
                assert one.release() is True
            assert node.stats()["leases"] == 0
    finally:
        node.stop()


def test_a_reader_of_its_own_sees_whether_leased_blocks_stayed_where_they_were(
    server: StoreServer, client: StoreClient, connect: Connect
) -> None:
    hashes = chain_of(3)
    put_chain(client, MANIFEST, hashes)
    reader = connect()
    reader.stats()
    directory = reader.channels()[0].directory
    assert directory is not None
    with client.acquire(MANIFEST, hashes, 0) as lease:
        offsets = [offset for offset, _ in lease.places()]
        places = directory.at(lease.known.names, 0, hashes, offsets)
        assert places is not None
        assert places.stand()
        assert directory.at(lease.known.names, 0, hashes, offsets[::-1]) is None
        assert (
            directory.at(lease.known.names, 0, hashes + chain_of(1, seed="b"), [*offsets, 0])
            is None
        )
        client.delete(MANIFEST, hashes[64:])
        assert not places.stand()
        assert directory.at(lease.known.names, 0, hashes, offsets) is None
    put_chain(client, MANIFEST, hashes)
    assert not places.stand()  # though it may be where it was
    reader.close()
    assert not places.stand()  # it keeps the directory mapped
