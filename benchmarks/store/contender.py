"""The interface between a client process of the store benchmark and a store.

Standard library only: client processes of other stores run in environments of their own.
"""

import ctypes
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

BATCH_BLOCKS = 16
Call: TypeAlias = Callable[[], object]


class Memory:
    """Anonymous memory with all its pages in place, and different contents."""

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
    """One client: its number, its blocks, its memory, and its server.

    Puts read `source`, gets write `landing`; block k is at k * block_bytes in both. Names of blocks
    begin with `client`, so that clients of one server have different blocks.
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
        """The source memory of these blocks."""
        size = self.block_bytes
        return self.source.view[first * size : (first + blocks) * size]

    def landed(self, first: int, blocks: int = 1) -> memoryview:
        """The landing memory of these blocks."""
        size = self.block_bytes
        return self.landing.view[first * size : (first + blocks) * size]


class Contender:
    """One way to move blocks. Only the calls that `putting` and `getting` make are timed.

    A call is the client library's own with its arguments in place (keys, addresses and ranges are
    made before the clock starts), and all else that a caller needs to get its bytes to their place.
    It returns when they are there. If that fails it raises, or returns something else than
    `answer`, which is checked after the clock has stopped.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def putting(self, first: int, blocks: int) -> Call:
        """A call that moves blocks first..first+blocks from `source` to the peer."""
        raise NotImplementedError

    def getting(self, first: int, blocks: int) -> Call:
        """A call that moves them back, into `landing`."""
        raise NotImplementedError

    def answer(self, op: str, blocks: int) -> object:
        """The return value of a successful call."""
        return None

    def calls(self, op: str, batch: int) -> list[Call]:
        """Calls that move every block once, in order. The client's blocks are whole batches."""
        make = self.putting if op == "put" else self.getting
        return [make(first, batch) for first in range(0, self.seat.blocks, batch)]

    def look(self, op: str, blocks: int, answer: object) -> None:
        """Raise RuntimeError if a call of that many blocks failed."""
        if answer != self.answer(op, blocks):
            raise RuntimeError(f"{op} of {blocks} block(s) answered {answer}")

    def put(self, first: int, blocks: int) -> None:
        """Move blocks to the peer."""
        self.look("put", blocks, self.putting(first, blocks)())

    def get(self, first: int, blocks: int) -> None:
        """Move blocks back."""
        self.look("get", blocks, self.getting(first, blocks)())

    def warm(self) -> None:
        """Touch memory that one round would not touch. Clients do this one after the other."""

    def repeat(self, op: str, turn: int) -> tuple[int, range]:
        """One call of a sustained operation: the number of units, and the blocks that landed."""
        raise NotImplementedError(f"{type(self).__name__} has no {op}")

    def land(self) -> None:
        """Copy blocks to `landing` if `get` leaves them elsewhere, before they are compared."""

    def forget(self) -> None:
        """Delete every block of this client in the store, if the next put needs that."""

    def close(self) -> None:
        """Delete the blocks of this client, and close the connection."""


def in_turn(calls: Sequence[Call]) -> Call:
    """Several calls as one, for a store without batches; it returns all answers."""
    if len(calls) == 1:
        return calls[0]
    return lambda: [call() for call in calls]


def connect(server: dict[str, str]) -> socket.socket:
    """A TCP connection to a server on this host."""
    link = socket.create_connection((server["host"], int(server["port"])), timeout=60)
    link.settimeout(None)  # blocking system calls: one each, and no poll before
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
