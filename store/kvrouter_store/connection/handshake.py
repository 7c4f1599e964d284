"""HELLO over a Unix socket, with the descriptors that go along: the fence out, the pool in.

What comes is mapped here; no descriptor of it stays open.
"""

import os
import select
import socket
from dataclasses import dataclass

from kvrouter_store import _core
from kvrouter_store._core import (
    DirectoryReader,
    ErrorReply,
    HelloReply,
    LocalWriter,
    PoolAccess,
    PoolView,
)
from kvrouter_store.connection.deadline import Deadline

__all__ = ["Handshake", "greet"]

READ_BYTES = 1 << 16
SHARED_FDS = 3  # pool, directory, notes


@dataclass(frozen=True, slots=True)
class Handshake:
    """What the server answered, and what it gave: None where it gives none."""

    reply: HelloReply | ErrorReply
    pool: PoolView | None = None
    directory: DirectoryReader | None = None
    writer: LocalWriter | None = None


@dataclass(frozen=True, slots=True)
class Fence:
    """A pipe that tells the server when this client can no longer write the pool."""

    read_fd: int
    write_fd: int

    @classmethod
    def open(cls) -> "Fence":
        """Make the pipe. The write end goes to a PoolView, the read end to the server."""
        return cls(*os.pipe2(os.O_CLOEXEC))


def greet(link: socket.socket, frame: bytes, *, writes: bool, deadline: Deadline) -> Handshake:
    """Send a HELLO that wants the pool (with a fence if it `writes` there), map what comes.

    Raises OSError where the link breaks, ValueError where what comes is no reply to it.
    """
    fence = Fence.open() if writes else None
    fds: list[int] = []
    try:
        socket.send_fds(link, [frame], [fence.read_fd] if fence else [])
        _await(link, deadline)
        data, fds, _, _ = socket.recv_fds(link, READ_BYTES, 4)
        reply = _understood(link, frame, data, deadline)
    except BaseException:
        _close(fds, fence.write_fd if fence else None)
        raise
    finally:
        if fence:
            os.close(fence.read_fd)
    return _mapped(reply, fds, fence)


def _understood(
    link: socket.socket, frame: bytes, data: bytes, deadline: Deadline
) -> HelloReply | ErrorReply:
    header, missing = None, _core.HEADER_BYTES - len(data)
    while missing > 0 or header is None:
        while missing > 0:
            _await(link, deadline)
            data += (piece := link.recv(missing))
            if not piece:
                raise ConnectionError("the store closed the connection")
            missing -= len(piece)
        if header is None:
            header = _core.decode_header(data)
            missing = _core.HEADER_BYTES + header.body_bytes - len(data)
    if missing or header.request_id != _core.decode_header(frame).request_id:
        raise ValueError("a reply came that was not asked for")
    reply = _core.decode_reply(header, data, _core.HEADER_BYTES)
    if not isinstance(reply, HelloReply | ErrorReply):
        raise ValueError("a reply came that was not asked for")
    return reply


def _mapped(reply: HelloReply | ErrorReply, fds: list[int], fence: Fence | None) -> Handshake:
    write_fd = fence.write_fd if fence else None
    try:
        if not fds or isinstance(reply, ErrorReply) or reply.access == PoolAccess.NONE:
            _close([], write_fd)
            return Handshake(reply)
        writable = reply.access == PoolAccess.WRITE
        pool = PoolView(fds[0], reply.pool_bytes, writable, write_fd, page_bytes=reply.page_bytes)
        if not reply.directory_bytes or len(fds) != SHARED_FDS:
            return Handshake(reply, pool)
        directory = DirectoryReader(fds[1], reply.directory_bytes, fds[2])
        return Handshake(reply, pool, directory, directory.writer() if writable else None)
    finally:
        _close(fds, None)


def _await(link: socket.socket, deadline: Deadline) -> None:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    if not poll.poll(deadline.left_s() * 1000):
        raise TimeoutError


def _close(fds: list[int], write_fd: int | None) -> None:
    for fd in fds if write_fd is None else [*fds, write_fd]:
        os.close(fd)
