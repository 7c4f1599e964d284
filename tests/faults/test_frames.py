"""Frames that nobody should send: the node lives, forgets the sender, and serves the others."""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.frames import get_frame, put_frame
from tests.fakes.gauges import assert_gauges_return, held
from tests.fakes.patience import eventually
from tests.fakes.store import HASH_BYTES, Memory, chain_of, content_of, manifest_of, put_chain

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient

BLOCK = 4096
BLOCKS = 8
MANIFEST = manifest_of(BLOCK)
CHAIN = chain_of(BLOCKS)
FRAMES = 1000
HELLO = _core.encode_hello(1, name="vandal")
GRACE_S = 10.0


@pytest.fixture
def client(url: str) -> Iterator[StoreClient]:
    with StoreClient(url, transport="tcp", deadline_s=5) as client:
        yield client


def send_and_hang_up(server: StoreServer, data: bytes, *, near: bool = False) -> bytes:
    """Send bytes on a connection of their own and read what comes until the node closes it."""
    assert server.unix_path is not None
    link = socket.socket(socket.AF_UNIX if near else socket.AF_INET)
    with link:
        link.settimeout(GRACE_S)
        link.connect(server.unix_path if near else ("127.0.0.1", server.port))
        answer = b""
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            while piece := link.recv(1 << 16):
                answer += piece
        except (ConnectionError, BrokenPipeError):
            pass  # it hung up first
        return answer


def ask(server: StoreServer, frame: bytes) -> tuple[_core.Header, object]:
    """The reply to one request on a connection of its own."""
    size = _core.HEADER_BYTES
    with socket.create_connection(("127.0.0.1", server.port), timeout=GRACE_S) as link:
        link.sendall(HELLO + frame)
        for _ in range(2):
            header = _core.decode_header(link.recv(size, socket.MSG_WAITALL))
            body = link.recv(header.body_bytes, socket.MSG_WAITALL) if header.body_bytes else b""
        return header, _core.decode_reply(header, body)


def requests(manifest_id: int) -> list[bytes]:
    """A valid frame of each kind."""
    one, zero = CHAIN[:HASH_BYTES], b"\0" * HASH_BYTES
    payload = content_of(one, BLOCK)
    put = put_frame(2, manifest_id, 0, one, BLOCK)
    crc = struct.pack("<I60x", _core.crc32c(payload))
    return [
        HELLO,
        _core.encode_register(
            2,
            spec=MANIFEST.spec.digest,
            manifest=MANIFEST.digest,
            engine="e",
            refusal="",
            doc=MANIFEST.doc,
            parts=[(MANIFEST.parts[0].digest, BLOCK)],
        ),
        _core.encode_manifests(2),
        _core.encode_match(2, manifest_id, CHAIN),
        _core.encode_reserve(2, manifest_id, 0, zero, chain_of(4, "x")),
        _core.encode_commit(2, manifest_id, 0, CHAIN[:64], [1, 2], [3, 4]),
        _core.encode_abort(2, manifest_id, 0, CHAIN[:64], [1, 2]),
        put + payload + crc,
        _core.encode_acquire(2, manifest_id, None, CHAIN),
        _core.encode_release(2, 1),
        get_frame(2, manifest_id, 0, CHAIN),
        _core.encode_wait(2, manifest_id, chain_of(2, "x"), 2, 300, True),
        _core.encode_cancel(3, 2),
        _core.encode_delete(2, manifest_id, chain_of(1, "x")),
        _core.encode_stats(2),
    ]


def mutated(frame: bytes, dice: random.Random) -> bytes:
    """One to four wounds: bytes changed, cut out, put in, or the end cut off."""
    data = bytearray(frame)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data)) if data else 0
        wound = dice.randrange(5)
        if wound == 0 and data:
            data[at] ^= 1 << dice.randrange(8)
        elif wound == 1 and data:
            data[at] = dice.choice((0, 0x7F, 0x80, 0xFF))
        elif wound == 2:
            del data[at : at + dice.randint(1, 16)]
        elif wound == 3:
            data[at:at] = dice.randbytes(dice.randint(1, 16))
        else:
            del data[at:]
    return bytes(data)


def assert_no_byte_is_wrong(client: StoreClient) -> None:
    """What is there is right, and everything can be put again."""
    put_chain(client, MANIFEST, CHAIN)
    memory = Memory(BLOCKS, BLOCK)
    span = range(BLOCKS)
    got = client.get_into(MANIFEST, 0, CHAIN, span, memory.segments, span)
    assert got == [BlockStatus.OK] * BLOCKS
    assert memory.data == Memory(BLOCKS, BLOCK).holds(CHAIN).data


def test_a_thousand_random_frames_do_no_harm(server: StoreServer, client: StoreClient) -> None:
    put_chain(client, MANIFEST, CHAIN)
    before = held(server)
    dice = random.Random(20240601)
    for number in range(FRAMES):
        body = dice.randbytes(dice.randint(0, 300))
        header = struct.pack(
            "<IBBHQIIQ",
            0x3152564B if number % 2 else dice.getrandbits(32),
            1 if number % 3 else dice.getrandbits(8),
            dice.randint(0, 20),
            dice.choice((0, 0, dice.getrandbits(16))),
            dice.getrandbits(64),
            dice.choice((len(body), dice.getrandbits(32))),
            dice.choice((0, 0, dice.getrandbits(32))),
            dice.choice((0, 0, dice.getrandbits(64))),
        )
        greeting = HELLO if number % 4 else b""
        send_and_hang_up(server, greeting + header + body, near=number % 5 == 0)
    assert server.running
    assert_gauges_return(server, before)
    assert_no_byte_is_wrong(client)
    assert server.stats()["bad_frames_total"] > 0


def test_a_thousand_mutated_frames_do_no_harm(server: StoreServer, client: StoreClient) -> None:
    put_chain(client, MANIFEST, CHAIN)
    manifest_id = client.register(MANIFEST).manifest_id
    before = held(server)
    dice = random.Random(20240602)
    valid = requests(manifest_id)
    for number in range(FRAMES):
        greeting = HELLO if number % 8 else b""
        frame = mutated(valid[number % len(valid)], dice)
        send_and_hang_up(server, greeting + frame, near=number % 5 == 0)
    assert server.running
    assert_gauges_return(server, before)
    assert_no_byte_is_wrong(client)


def test_every_valid_frame_is_answered(server: StoreServer, client: StoreClient) -> None:
    """The corpus above is worth mutating: unharmed, each frame gets its reply."""
    put_chain(client, MANIFEST, CHAIN)
    manifest_id = client.register(MANIFEST).manifest_id
    for frame in requests(manifest_id)[1:]:
        header, reply = ask(server, frame)
        if header.op not in (_core.Op.WAIT, _core.Op.COMMIT, _core.Op.ABORT, _core.Op.RESERVE):
            assert not isinstance(reply, _core.ErrorReply), (header.op, reply.message)


@pytest.mark.parametrize("near", [False, True])
def test_a_request_cut_at_any_byte_leaves_nothing(
    server: StoreServer, client: StoreClient, near: bool
) -> None:
    manifest_id = client.register(MANIFEST).manifest_id
    before = held(server)
    for frame in requests(manifest_id):
        for cut in {1, 31, 32, 33, len(frame) // 2, len(frame) - 1}:
            if cut < len(frame):
                send_and_hang_up(server, HELLO + frame[:cut], near=near)
    assert_gauges_return(server, before)
    assert server.stats()["blocks"] == 0
    assert_no_byte_is_wrong(client)


def test_half_a_payload_is_invisible_while_its_sender_pauses(
    server: StoreServer, client: StoreClient
) -> None:
    manifest_id = client.register(MANIFEST).manifest_id
    one = CHAIN[:HASH_BYTES]
    frame = put_frame(2, manifest_id, 0, one, BLOCK) + content_of(one, BLOCK)[:2000]
    before = held(server)
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        link.sendall(HELLO + frame)
        assert eventually(lambda: server.stats()["reserved_blocks"] == 1)
        assert client.match(MANIFEST, one).blocks == 0
        sink = Memory(1, BLOCK)
        got = client.get_into(MANIFEST, 0, one, range(1), sink.segments, [0])
        assert got == [BlockStatus.MISSING]
    assert_gauges_return(server, before)
    assert put_chain(client, MANIFEST, one) == 1


def test_a_payload_that_does_not_match_its_digest_is_not_stored(
    server: StoreServer, client: StoreClient
) -> None:
    manifest_id = client.register(MANIFEST).manifest_id
    one = CHAIN[:HASH_BYTES]
    frame = put_frame(2, manifest_id, 0, one, BLOCK)
    _, reply = ask(server, frame + b"\x55" * BLOCK + bytes(64))
    assert isinstance(reply, _core.StatusesReply)
    assert list(reply.statuses) == [BlockStatus.CORRUPT]
    assert client.match(MANIFEST, one).blocks == 0
    assert server.stats()["reserved_blocks"] == 0


def test_half_a_frame_has_a_deadline() -> None:
    node = StoreServer(pool_bytes=1 << 20, frame_deadline_s=0.2)
    node.start()
    with socket.create_connection(("127.0.0.1", node.port)) as link:
        link.settimeout(GRACE_S)
        link.sendall(HELLO[:10])
        with contextlib.suppress(ConnectionResetError):
            assert link.recv(100) == b""
    assert eventually(lambda: node.stats()["connections"] == 0)
    node.stop()


def greet(server: StoreServer, fds: list[int], *, near: bool) -> object:
    """The reply to a HELLO that wants to write the pool and brings these descriptors."""
    assert server.unix_path is not None
    link = socket.socket(socket.AF_UNIX if near else socket.AF_INET)
    with link:
        link.settimeout(GRACE_S)
        link.connect(server.unix_path if near else ("127.0.0.1", server.port))
        frame = _core.encode_hello(1, want_pool=True, want_write=True)
        if near:
            socket.send_fds(link, [frame], fds)
        else:
            link.sendall(frame)
        data, got, _, _ = socket.recv_fds(link, 1 << 16, 4)
        for fd in got:
            os.close(fd)
        reply = _core.decode_reply(_core.decode_header(data), data, _core.HEADER_BYTES)
        write = isinstance(reply, _core.HelloReply) and reply.access == _core.PoolAccess.WRITE
        return write and bool(got)


def test_nobody_writes_the_pool_without_a_fence(server: StoreServer, tmp_path: Path) -> None:
    before = held(server)
    read_end, write_end = os.pipe()
    regular = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert greet(server, [read_end], near=True)
    assert not greet(server, [], near=True)
    assert not greet(server, [regular], near=True)
    assert not greet(server, [], near=False)
    for fd in (read_end, write_end, regular):
        os.close(fd)
    assert_gauges_return(server, before)
