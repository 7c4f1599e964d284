"""Clients of an earlier version at today's node: recorded requests get the recorded replies.

`record_frames.py` says how the recording was made.
"""

import base64
import json
import mmap
import os
import socket
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from tests.conformance.record_frames import BLOCK, HASH_BYTES, PATIENCE_S, chain
from tests.fakes.store import content_of

from kvrouter_store import _core
from kvrouter_store._core import (
    BlockStatus,
    ErrorReply,
    GetReply,
    ManifestsReply,
    ReserveReply,
    StatsReply,
    Status,
    StoreServer,
)

RECORDING = Path(__file__).parent / "recorded" / "kvstore-a918363.json"
SCENARIOS: dict[str, list[tuple[int, str, str]]] = json.loads(RECORDING.read_text())
WANTS_WRITE = 2  # of HelloFlags in csrc/wire/wire.h
THROUGH_UNIX_SOCKET = {"shared_memory", "asyncio_client"}
POOL_BYTES = 1 << 20
# What is another for each node, or says where its memory lies.
OF_THE_NODE = {"epoch", "session", "unix_path", "boot_id", "page_bytes", "directory_bytes"}


class OldConnection:
    """One connection of a recorded client, to the Unix socket or the port of a node."""

    def __init__(self, door: str | int) -> None:
        family = socket.AF_UNIX if isinstance(door, str) else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(door if isinstance(door, str) else ("127.0.0.1", door))
        self._replies: dict[int, tuple[_core.Header, object, bytes]] = {}
        self._pool: mmap.mmap | None = None
        self._fence: tuple[int, int] | None = None

    def send(self, frame: bytes) -> None:
        """Send a request; a HELLO that wants to write the pool takes its fence along."""
        fds = []
        if frame[5] == _core.Op.HELLO:
            flags = int.from_bytes(frame[_core.HEADER_BYTES :][:4], "little")
            self._fence = os.pipe() if flags & WANTS_WRITE else None
            fds = [self._fence[0]] if self._fence else []
        socket.send_fds(self._socket, [frame], fds)

    def reply(self, request_id: int) -> tuple[_core.Header, object, bytes]:
        """The reply to this request: header, body, payload. Others may come before it."""
        while request_id not in self._replies:
            header = _core.decode_header(self._exactly(_core.HEADER_BYTES))
            body = _core.decode_reply(header, self._exactly(header.body_bytes))
            self._replies[header.request_id] = header, body, self._exactly(header.payload_bytes)
        return self._replies.pop(request_id)

    def write(self, reply: ReserveReply, hashes: bytes) -> None:
        """Fill the slots that were granted, as the recorded client did."""
        if self._pool is None:
            return
        for k, (status, offset) in enumerate(zip(reply.statuses, reply.offsets, strict=True)):
            if status == BlockStatus.GRANTED:
                block = hashes[k * HASH_BYTES : (k + 1) * HASH_BYTES]
                self._pool[offset : offset + BLOCK] = content_of(block, BLOCK)

    def close(self) -> None:
        self._socket.close()
        if self._pool is not None:
            self._pool.close()
        for fd in self._fence or ():
            os.close(fd)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece, fds, _, _ = socket.recv_fds(self._socket, size - len(data), 4)
            if not piece:
                raise ConnectionError("the node closed the connection")
            data += piece
            if fds and self._fence:
                self._pool = mmap.mmap(fds[0], POOL_BYTES)
            for fd in fds:
                os.close(fd)
        return data


@contextmanager
def node_of(folder: Path, scenario: str, *, digests: bool = True) -> Iterator[str | int]:
    """Where today's node takes the clients of the scenario, with digests checked or off."""
    path = str(folder / "node.sock")
    server = StoreServer(unix_path=path, pool_bytes=POOL_BYTES, digests=digests)
    server.start()
    try:
        yield path if scenario in THROUGH_UNIX_SOCKET else server.port
    finally:
        server.stop()


def replay(door: str | int, scenario: str) -> list[str]:
    """Send what was recorded, in its order; where today's replies differ from the recorded ones."""
    differences: list[str] = []
    connections: dict[int, OldConnection] = {}
    with ExitStack() as stack:
        for number, sender, frame in frames_of(scenario):
            if number not in connections:
                connections[number] = stack.enter_context(closing(OldConnection(door)))
            connection = connections[number]
            if sender == "client":
                connection.send(frame)
                continue
            wanted = decoded(frame)
            found = connection.reply(wanted[0].request_id)
            differences += differing(wanted, found)
            if isinstance(found[1], ReserveReply):
                connection.write(found[1], chain(len(found[1].statuses), "shm"))
    return differences


def frames_of(scenario: str) -> Iterator[tuple[int, str, bytes]]:
    """The connection of each frame, whether client or node sent it, and the frame."""
    for number, sender, packed in SCENARIOS[scenario]:
        yield number, sender, zlib.decompress(base64.b64decode(packed))


def decoded(frame: bytes) -> tuple[_core.Header, object, bytes]:
    """A recorded reply as today's client would understand it: header, body, payload."""
    header = _core.decode_header(frame)
    body = _core.decode_reply(header, frame, _core.HEADER_BYTES)
    return header, body, frame[_core.HEADER_BYTES + header.body_bytes :]


def differing(
    wanted: tuple[_core.Header, object, bytes], found: tuple[_core.Header, object, bytes]
) -> list[str]:
    """What the old client would notice, as sentences."""
    where = f"{wanted[0].op.name} {wanted[0].request_id}"
    pairs = {"status": (wanted[0].status, found[0].status), "payload": (wanted[2], found[2])}
    before, now = fields_of(wanted[1]), fields_of(found[1])
    pairs |= {name: (before.get(name), now.get(name)) for name in before | now}
    if isinstance(wanted[1], GetReply) and not any(wanted[1].crcs):
        del pairs["crcs"]  # the client asked for none, and looks at none
    if isinstance(wanted[1], StatsReply):  # new figures do no harm
        pairs = {name: pair for name, pair in pairs.items() if name in before}
    return [f"{where}: {name} was {a}, is {b}" for name, (a, b) in pairs.items() if a != b]


def fields_of(reply: object) -> dict[str, object]:
    """The fields that an old client goes by: of an error its status, not its message."""
    if isinstance(reply, StatsReply):
        return dict.fromkeys(reply.values, "a figure")
    names = {name for name in dir(reply) if not name.startswith("_")} - OF_THE_NODE
    fields = {name: getattr(reply, name) for name in names}
    if isinstance(reply, ErrorReply):
        del fields["message"]
    if isinstance(reply, ManifestsReply):
        fields["manifests"] = [fields_of(one) for one in reply.manifests]
    return {"type": type(reply), **fields}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_recorded_requests_get_the_recorded_replies(tmp_path: Path, scenario: str) -> None:
    with node_of(tmp_path, scenario) as door:
        assert replay(door, scenario) == []


def test_a_client_that_had_nothing_to_do_with_digests_is_served_where_they_are_off(
    tmp_path: Path,
) -> None:
    with node_of(tmp_path, "without_digests", digests=False) as door:
        assert replay(door, "without_digests") == []


@pytest.mark.parametrize("scenario", ["over_tcp", "vouched", "asyncio_client"])
def test_a_client_that_has_digests_hears_that_they_are_off(tmp_path: Path, scenario: str) -> None:
    _, _, hello = next(frames_of(scenario))
    with ExitStack() as stack:
        door = stack.enter_context(node_of(tmp_path, scenario, digests=False))
        connection = stack.enter_context(closing(OldConnection(door)))
        connection.send(hello)
        header, reply, _ = connection.reply(1)
    assert header.status == Status.NOT_ALLOWED
    assert isinstance(reply, ErrorReply)
    assert "digests" in reply.message
