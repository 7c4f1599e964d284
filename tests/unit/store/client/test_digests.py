"""Digests are the node's setting: checked, also for clients of earlier versions, or off."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.frames import LINE_BYTES, put_frame
from tests.fakes.patience import eventually
from tests.fakes.raw import RawLink
from tests.fakes.store import HASH_BYTES, Memory, chain_of, content_of, manifest_of, put_chain

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, StatusesReply, StoreServer
from kvrouter_store.client.blocking import StoreClient

BLOCK = 100_000
MANIFEST = manifest_of(BLOCK)
VOUCH, NO_DIGESTS = 4, 8
"""What clients of earlier versions said in their HELLO."""
OK, STORED, CORRUPT = BlockStatus.OK, BlockStatus.STORED, BlockStatus.CORRUPT

Connect = Callable[..., StoreClient]


def put_raw(server: StoreServer, hashes: bytes, flags: int, wrong: int | None = None) -> bytes:
    """Put a chain; the digest of block `wrong` is another than its bytes have. The statuses."""
    with RawLink(server.port, flags=flags) as link:
        frame = put_frame(
            link.next_id(), link.register(MANIFEST), 0, hashes, MANIFEST.parts[0].block_bytes
        )
        for k in range(len(hashes) // HASH_BYTES):
            data = content_of(hashes[k * HASH_BYTES :][:HASH_BYTES], BLOCK)
            digest = _core.crc32c(data) ^ (k == wrong)
            frame += data + digest.to_bytes(LINE_BYTES, "little")
        reply = link.ask(frame).reply
    assert isinstance(reply, StatusesReply)
    return bytes(reply.statuses)


@pytest.fixture(autouse=True)
def gives_everything_back(server: StoreServer) -> Iterator[None]:
    yield
    server.purge()

    def nothing_left() -> bool:  # what a client had lent is its own until it has gone
        stats = server.stats()
        return stats["used_bytes"] == stats["lent_bytes"]

    assert eventually(nothing_left)


@pytest.mark.parametrize("flags", [0, VOUCH, NO_DIGESTS, VOUCH | NO_DIGESTS])
def test_what_a_client_of_an_earlier_version_put_is_read_by_everybody(
    flags: int, server: StoreServer, connect: Connect
) -> None:
    hashes = chain_of(3)
    wrong = 1 if flags & NO_DIGESTS else None  # what it says of them means nothing then
    assert put_raw(server, hashes, flags, wrong) == bytes([STORED] * 3)
    for reader in (connect("tcp"), connect("unix"), connect("shm")):
        memory, wanted = Memory(3, BLOCK), Memory(3, BLOCK).holds(hashes)
        got = reader.get_into(MANIFEST, 0, hashes, range(3), memory.segments, range(3))
        assert got == [OK] * 3
        assert memory.data == wanted.data


@pytest.mark.parametrize("flags", [0, VOUCH])
def test_a_wrong_digest_is_found_before_anybody_finds_the_block(
    flags: int, server: StoreServer, connect: Connect
) -> None:
    hashes = chain_of(2)
    assert put_raw(server, hashes, flags, wrong=1) == bytes([STORED, CORRUPT])
    assert connect("tcp").match(MANIFEST, hashes).blocks == 1


def test_a_client_says_once_that_the_store_has_digests_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = StoreServer(unix_path=str(tmp_path / "off.sock"), pool_bytes=16 << 20, digests=False)
    node.start()
    try:
        with StoreClient(f"kv+unix://{node.unix_path}", transport="shm") as client:
            put_chain(client, MANIFEST, chain_of(1))
            client.match(MANIFEST, chain_of(1))  # over another connection
    finally:
        node.stop()
    assert [line for line in caplog.messages if "digests off" in line] == [
        "the store has digests off: nothing that is read from it is checked"
    ]


def test_a_client_of_an_earlier_version_is_refused_where_digests_are_off() -> None:
    node = StoreServer(pool_bytes=1 << 20, digests=False)
    node.start()
    try:
        with pytest.raises(ConnectionRefusedError, match="digests off"):
            RawLink(node.port, flags=0)
        RawLink(node.port, flags=NO_DIGESTS).close()
    finally:
        node.stop()


@pytest.mark.parametrize(
    "settings", [{"check_puts": False}, {"digest_puts": True}, {"check_puts": 1, "digest_puts": 0}]
)
def test_a_setting_of_earlier_versions_is_taken_says_so_once_and_changes_nothing(
    connect: Connect, settings: dict[str, bool]
) -> None:
    with pytest.warns(DeprecationWarning, match="kvrouter store --digests off") as told:
        client = connect("tcp", **settings)
    assert len(told) == 1
    assert told[0].filename == str(Path(__file__).parent.parent / "conftest.py")
    assert put_chain(client, MANIFEST, chain_of(1)) == 1
