"""The seam of the store benchmark: what a client process asks of whoever takes part.

Standard library only: client processes of other stores run in environments of their own.
"""

import ctypes
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Contender", "Memory", "Seat", "connect", "receive", "send"]

BATCH_BLOCKS = 16


class Memory:
    """Anonymous memory with all its pages in place, and not all alike."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size)
        page = os.urandom(mmap.PAGESIZE)
        for at in range(0, size, mmap.PAGESIZE):
            self._map[at : at + mmap.PAGESIZE] = page
            self._map[at : at + 8] = at.to_bytes(8, "little")
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


@dataclass(frozen=True)
class Seat:
    """Where one client sits: which of them it is, its blocks, its memory, and its server.

    Puts read `source`, gets write `landing`; block k lies at k * block_bytes in both. Names of
    blocks begin with `client`, so that clients of one server do not meet.
    """

    client: int
    block_bytes: int
    blocks: int
    source: Memory
    landing: Memory
    server: dict[str, str]
    options: dict[str, str]

    def name(self, block: int) -> str:
        """The key of a block, of the same length for all of them."""
        return f"bench:{self.client:02d}:{block:08d}"

    def names(self, first: int, blocks: int) -> list[str]:
        """The keys of some blocks in a row."""
        return [self.name(block) for block in range(first, first + blocks)]

    def sent(self, first: int, blocks: int = 1) -> memoryview:
        """What is put of these blocks."""
        size = self.block_bytes
        return self.source.view[first * size : (first + blocks) * size]

    def landed(self, first: int, blocks: int = 1) -> memoryview:
        """Where these blocks land."""
        size = self.block_bytes
        return self.landing.view[first * size : (first + blocks) * size]


class Contender:
    """One way to move blocks. `put` and `get` are timed, nothing else is.

    Both return when the bytes are where they belong, and raise where that failed.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def put(self, first: int, blocks: int) -> None:
        """Move blocks first..first+blocks from `source` to the peer."""
        raise NotImplementedError

    def get(self, first: int, blocks: int) -> None:
        """Move them back, into `landing`."""
        raise NotImplementedError

    def warm(self) -> None:
        """Touch what one round would not touch. Clients do this one after the other."""

    def repeat(self, op: str, turn: int) -> tuple[int, range]:
        """One call of a sustained operation: how many units it did, and which blocks landed."""
        raise NotImplementedError(f"{type(self).__name__} has no {op}")

    def land(self) -> None:
        """Copy into `landing` what `get` leaves elsewhere; before the bytes are compared."""

    def forget(self) -> None:
        """Delete every block of this client at the peer, where the next put needs that."""

    def close(self) -> None:
        """Leave the peer without a block of this client, and hang up."""


def connect(server: dict[str, str]) -> socket.socket:
    """A TCP connection to a server on this host."""
    link = socket.create_connection((server["host"], int(server["port"])), timeout=60)
    link.settimeout(None)  # blocking system calls: one each, and no poll before
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def send(link: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    """Send all the pieces, gathered by the kernel."""
    left = sum(len(piece) for piece in pieces)
    sent = link.sendmsg(pieces)
    while sent < left:
        pieces, left = _rest(pieces, sent), left - sent
        sent = link.sendmsg(pieces)


def receive(link: socket.socket, pieces: Sequence[bytearray | memoryview]) -> None:
    """Fill all the pieces, scattered by the kernel."""
    left = sum(len(piece) for piece in pieces)
    while True:
        got = link.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]
        if got == left:
            return
        if got == 0:
            raise ConnectionError("the server hung up")
        pieces, left = [memoryview(piece) for piece in _rest(pieces, got)], left - got


def _rest(pieces: Sequence[bytes | bytearray | memoryview], done: int) -> list[memoryview]:
    """The pieces without their first `done` bytes."""
    views = [memoryview(piece) for piece in pieces]
    while views and done >= len(views[0]):
        done -= len(views.pop(0))
    if views:
        views[0] = views[0][done:]
    return views
