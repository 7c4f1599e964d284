"""The HELLO over a Unix socket and the descriptors that pass with it: the fence, and the pool.

What the node sends is mapped here; none of its descriptors stays open.
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

READ_BYTES = 1 << 16
SHARED_FDS = 3  # pool, directory, notes


@dataclass(frozen=True, slots=True)
class Handshake:
    """What the node answered, and what it shares: None where it shares nothing."""

    reply: HelloReply | ErrorReply
    pool: PoolView | None = None
    directory: DirectoryReader | None = None
    writer: LocalWriter | None = None


def exchange_hello(
    link: socket.socket, frame: bytes, deadline: Deadline, *, writes: bool
) -> Handshake:
    """Send a HELLO that asks for the pool, and map what comes.

    A client that `writes` sends a fence along: the read end of a pipe, which shows the node when
    this client can no longer write the pool. Raises OSError where the link breaks, ValueError where
    something else comes than a reply to HELLO.
    """
    fence_read, fence_write = os.pipe2(os.O_CLOEXEC) if writes else (None, None)
    fds: list[int] = []
    try:
        socket.send_fds(link, [frame], [] if fence_read is None else [fence_read])
        _await(link, deadline)
        data, fds, _, _ = socket.recv_fds(link, READ_BYTES, 4)
        reply = _understood(link, frame, data, deadline)
    except BaseException:
        _close(*fds, fence_write)
        raise
    finally:
        _close(fence_read)
    return _mapped(reply, fds, fence_write)


def _understood(
    link: socket.socket, frame: bytes, data: bytes, deadline: Deadline
) -> HelloReply | ErrorReply:
    data = _filled(link, data, _core.HEADER_BYTES, deadline)
    header = _core.decode_header(data)
    size = _core.HEADER_BYTES + header.body_bytes
    data = _filled(link, data, size, deadline)
    if len(data) > size or header.request_id != _core.decode_header(frame).request_id:
        raise ValueError("a reply came that was not asked for")
    reply = _core.decode_reply(header, data, _core.HEADER_BYTES)
    if not isinstance(reply, HelloReply | ErrorReply):
        raise ValueError("a reply came that was not asked for")
    return reply


def _filled(link: socket.socket, data: bytes, size: int, deadline: Deadline) -> bytes:
    """The data, and what comes until there are at least `size` bytes of it."""
    while len(data) < size:
        _await(link, deadline)
        piece = link.recv(size - len(data))
        if not piece:
            raise ConnectionError("the store closed the connection")
        data += piece
    return data


def _mapped(reply: HelloReply | ErrorReply, fds: list[int], fence_write: int | None) -> Handshake:
    """Takes ownership of the descriptors."""
    try:
        if not fds or isinstance(reply, ErrorReply) or reply.access == PoolAccess.NONE:
            _close(fence_write)
            return Handshake(reply)
        writable = reply.access == PoolAccess.WRITE
        page_bytes = reply.page_bytes
        pool = PoolView(fds[0], reply.pool_bytes, writable, fence_write, page_bytes=page_bytes)
        if not reply.directory_bytes or len(fds) != SHARED_FDS:
            return Handshake(reply, pool)
        directory = DirectoryReader(fds[1], reply.directory_bytes, fds[2])
        return Handshake(reply, pool, directory, directory.writer() if writable else None)
    finally:
        _close(*fds)


def _await(link: socket.socket, deadline: Deadline) -> None:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    if not poll.poll(deadline.left_s() * 1000):
        raise TimeoutError


def _close(*fds: int | None) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)
