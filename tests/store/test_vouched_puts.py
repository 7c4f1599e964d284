"""Puts that the node does not check as they come: who reads them finds out what is wrong."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.certificates import Authority
from tests.fakes.raw import RawLink
from tests.fakes.store import (
    HASH_BYTES,
    Memory,
    chain_of,
    content_of,
    eventually,
    manifest_of,
    overwrite_stored,
    put_chain,
)

from kvstore import _core
from kvstore._core import BlockStatus, StatusesReply, StoreServer
from kvstore.client import StoreClient, TransportName

BLOCK = 100_000
MANIFEST = manifest_of(BLOCK)
LINE_BYTES = 64
OK, STORED = BlockStatus.OK, BlockStatus.STORED

Connect = Callable[..., StoreClient]


def names(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def put_raw(server: StoreServer, hashes: bytes, wrong: int | None = None, *, vouch: bool) -> bytes:
    """Put a chain; the digest of block `wrong` is another than its bytes have. The statuses."""
    with RawLink(server.port, vouch=vouch) as link:
        frame = _core.encode_put(
            link.next_id(), link.register(MANIFEST), 0, None, hashes, MANIFEST.parts[0].block_bytes
        )
        for k, name in enumerate(names(hashes)):
            data = content_of(name, BLOCK)
            digest = _core.crc32c(data) ^ (k == wrong)
            frame += data + digest.to_bytes(LINE_BYTES, "little")
        reply = link.ask(frame).reply
    assert isinstance(reply, StatusesReply)
    return bytes(reply.statuses)


def asked(server: StoreServer) -> int:
    """How often the node was asked for a lease."""
    return server.stats()["operation_ns.acquire.le_inf"]


@pytest.fixture
def mapping(connect: Connect) -> StoreClient:
    """Maps the pool and trusts what it is given to read there."""
    return connect("shm", verify=False)


@pytest.fixture(params=["tcp", "unix"])
def vouching(request: pytest.FixtureRequest, connect: Connect) -> StoreClient:
    transport: TransportName = request.param
    return connect(transport, check_puts=False)


@pytest.fixture(autouse=True)
def gives_everything_back(server: StoreServer) -> Iterator[None]:
    yield
    server.purge()

    def nothing_left() -> bool:  # what a client had lent is its own until it has gone
        stats = server.stats()
        return stats["used_bytes"] == stats["lent_bytes"]

    assert eventually(nothing_left)


def test_what_was_vouched_for_is_read_by_everybody(vouching: StoreClient, connect: Connect) -> None:
    hashes = chain_of(3)
    assert put_chain(vouching, MANIFEST, hashes) == 3
    for reader in (vouching, connect("tcp"), connect("unix"), connect("shm"), connect("shm")):
        memory, wanted = Memory(3, BLOCK), Memory(3, BLOCK).holds(hashes)
        got = reader.get_into(MANIFEST, 0, hashes, range(3), memory.segments, range(3))
        assert got == [OK] * 3
        assert memory.data == wanted.data


@pytest.mark.parametrize("vouch", [False, True])
def test_a_wrong_digest_is_found_at_the_latest_by_who_reads(
    vouch: bool, server: StoreServer, connect: Connect
) -> None:
    hashes = chain_of(1)
    expected = BlockStatus.STORED if vouch else BlockStatus.CORRUPT
    assert put_raw(server, hashes, wrong=0, vouch=vouch) == bytes([expected.value])
    reader, memory = connect("tcp"), Memory(1, BLOCK)
    assert reader.match(MANIFEST, hashes).blocks == int(vouch)
    found = reader.get_into(MANIFEST, 0, hashes, range(1), memory.segments, [0])
    assert found == [BlockStatus.CORRUPT if vouch else BlockStatus.MISSING]
    assert reader.match(MANIFEST, hashes).blocks == 0


def test_who_maps_the_pool_leases_no_block_whose_digest_is_wrong(
    server: StoreServer, mapping: StoreClient
) -> None:
    hashes = chain_of(3)
    assert put_raw(server, hashes, wrong=1, vouch=True) == bytes([STORED.value] * 3)
    with mapping.acquire(MANIFEST, hashes) as lease:
        assert lease.blocks == 1
        assert bytes(lease.view(0)) == content_of(names(hashes)[0], BLOCK)
    assert server.stats()["corrupt_total"] == 1
    assert mapping.match(MANIFEST, hashes).blocks == 1


def test_who_maps_the_pool_copies_no_block_whose_digest_is_wrong(
    server: StoreServer, mapping: StoreClient
) -> None:
    hashes = chain_of(2)
    put_raw(server, hashes, wrong=1, vouch=True)
    memory = Memory(2, BLOCK)
    got = mapping.get_into(MANIFEST, 0, hashes, range(2), memory.segments, range(2))
    assert got == [OK, BlockStatus.MISSING]


def test_a_block_is_checked_once_and_then_found_without_asking(
    vouching: StoreClient, mapping: StoreClient, server: StoreServer
) -> None:
    hashes = chain_of(2)
    put_chain(vouching, MANIFEST, hashes)
    for _ in range(2):
        with mapping.acquire(MANIFEST, hashes) as lease:
            assert lease.blocks == 2
            assert bytes(lease.view(1)) == content_of(names(hashes)[1], BLOCK)
    assert asked(server) == 1  # the first time the node looked


@pytest.mark.parametrize("transport", ["tcp", "unix", "shm"])
def test_what_a_client_put_without_digests_is_read_by_everybody(
    transport: TransportName, connect: Connect
) -> None:
    hashes = chain_of(3)
    blind = connect(transport, verify=False, digest_puts=False)
    assert put_chain(blind, MANIFEST, hashes) == 3
    for reader in (blind, connect("tcp"), connect("unix"), connect("shm"), connect("shm")):
        memory, wanted = Memory(3, BLOCK), Memory(3, BLOCK).holds(hashes)
        got = reader.get_into(MANIFEST, 0, hashes, range(3), memory.segments, range(3))
        assert got == [OK] * 3
        assert memory.data == wanted.data
    with connect("shm").acquire(MANIFEST, hashes) as lease:
        assert lease.blocks == 3


def test_a_digest_that_was_left_out_guards_the_block_from_when_it_was_first_needed(
    connect: Connect, server: StoreServer
) -> None:
    hashes, memory = chain_of(1), Memory(1, BLOCK)
    assert put_chain(connect("tcp", verify=False, digest_puts=False), MANIFEST, hashes) == 1
    reader = connect("tcp")
    assert reader.get_into(MANIFEST, 0, hashes, range(1), memory.segments, [0]) == [OK]
    assert server.unix_path is not None
    overwrite_stored(server.unix_path, MANIFEST, hashes, b"x")
    got = reader.get_into(MANIFEST, 0, hashes, range(1), memory.segments, [0])
    assert got == [BlockStatus.CORRUPT]


def test_who_verifies_may_not_leave_digests_out(url: str) -> None:
    with pytest.raises(ValueError, match="digest_puts needs verify=False"):
        StoreClient(url, digest_puts=False)


def test_a_client_may_leave_digests_out_under_tls(authority: Authority) -> None:
    hashes = chain_of(2)
    node = StoreServer(pool_bytes=16 << 20, tls=authority.sign().server())
    node.start()
    try:
        url, trust = f"kvs://127.0.0.1:{node.port}", authority.trust
        with (
            StoreClient(url, verify=False, digest_puts=False, tls=trust) as writer,
            StoreClient(url, tls=trust) as reader,
        ):
            assert put_chain(writer, MANIFEST, hashes) == 2
            for client in (writer, reader):
                memory, wanted = Memory(2, BLOCK), Memory(2, BLOCK).holds(hashes)
                got = client.get_into(MANIFEST, 0, hashes, range(2), memory.segments, range(2))
                assert got == [OK] * 2
                assert memory.data == wanted.data
    finally:
        node.stop()


def test_a_client_may_vouch_under_tls(authority: Authority, tmp_path: Path) -> None:
    hashes, path = chain_of(2), str(tmp_path / "tls.sock")
    node = StoreServer(unix_path=path, pool_bytes=16 << 20, tls=authority.sign().server())
    node.start()
    try:
        url, trust = f"kvs://127.0.0.1:{node.port}", authority.trust
        with (
            StoreClient(url, transport="tcp", check_puts=False, tls=trust) as writer,
            StoreClient(f"kv+unix://{path}", transport="shm") as reader,
        ):
            assert put_chain(writer, MANIFEST, hashes) == 2
            with reader.acquire(MANIFEST, hashes) as lease:
                assert lease.blocks == 2
            assert asked(node) == 1
    finally:
        node.stop()


def test_over_shared_memory_digests_are_computed_of_what_is_copied(
    connect: Connect, server: StoreServer
) -> None:
    hashes = chain_of(2)
    assert put_chain(connect("shm", check_puts=False), MANIFEST, hashes) == 2
    with connect("shm").acquire(MANIFEST, hashes) as lease:
        assert lease.blocks == 2
    assert asked(server) == 0
