"""Redis, with the cheapest possible client in Python: it knows the replies.

MSET and MGET of all blocks of a call, with one system call each way if possible.
"""

import socket
from collections.abc import Sequence
from functools import partial

from benchmarks.store.contender import Call, Contender, Seat, connect

CRLF = b"\r\n"


class Redis(Contender):
    """RESP over a TCP connection of its own; the kernel scatters replies to their place."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._link = connect(seat.server)
        self._keys = [_bulk(name) for name in seat.names(0, seat.blocks)]
        self._length = b"$%d\r\n" % seat.block_bytes

    def putting(self, first: int, blocks: int) -> Call:
        """One MSET."""
        pieces: list[bytes | memoryview] = [_command("MSET", 2 * blocks)]
        for block in range(first, first + blocks):
            pieces += (self._keys[block] + self._length, self.seat.sent(block), CRLF)
        return partial(self._put, pieces)

    def getting(self, first: int, blocks: int) -> Call:
        """One MGET."""
        asked = _command("MGET", blocks) + b"".join(self._keys[first : first + blocks])
        texts = [b"*%d\r\n" % blocks + self._length]
        texts += [CRLF + self._length] * (blocks - 1) + [CRLF]
        got = [bytearray(len(text)) for text in texts]
        pieces: list[bytearray | memoryview] = [got[0]]
        for block, text in enumerate(got[1:], first):
            pieces += (self.seat.landed(block), text)
        return partial(self._get, asked, pieces, got, texts)

    def close(self) -> None:
        """Delete by name, and close the connection."""
        self._link.sendall(_command("DEL", len(self._keys)) + b"".join(self._keys))
        self._link.recv(64)
        self._link.close()

    def _put(self, pieces: Sequence[bytes | memoryview]) -> None:
        left = sum(len(piece) for piece in pieces)
        while (sent := self._link.sendmsg(pieces)) < left:
            pieces, left = _rest(pieces, sent), left - sent
        if (got := self._link.recv(5, socket.MSG_WAITALL)) != b"+OK\r\n":
            raise RuntimeError(f"answered {got!r}")

    def _get(
        self,
        asked: bytes,
        pieces: Sequence[bytearray | memoryview],
        got: list[bytearray],
        texts: list[bytes],
    ) -> None:
        """Ask, and fill `pieces`. Raises RuntimeError if `got` of them are not `texts` then."""
        self._link.sendall(asked)
        left = sum(len(piece) for piece in pieces)
        while (came := self._link.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]) < left:
            if came == 0:
                raise ConnectionError("the server hung up")
            pieces, left = _rest(pieces, came), left - came
        if got != texts:
            raise RuntimeError(f"not the reply to {asked[:40]!r} where all blocks are there")


def _rest(pieces: Sequence[bytes | bytearray | memoryview], done: int) -> list[memoryview]:
    """The pieces without their first `done` bytes."""
    views = [memoryview(piece) for piece in pieces]
    while views and done >= len(views[0]):
        done -= len(views.pop(0))
    if views:
        views[0] = views[0][done:]
    return views


def _command(name: str, arguments: int) -> bytes:
    return b"*%d\r\n" % (arguments + 1) + _bulk(name)


def _bulk(text: str) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text.encode())
