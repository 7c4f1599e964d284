"""Redis, with the cheapest possible client in Python: it knows the replies.

MSET and MGET of all blocks of a call, with one system call each way if possible.
"""

from functools import partial

from benchmarks.store.contender import Call, Seat, TextClient

__all__ = ["Redis"]

CRLF = b"\r\n"


class Redis(TextClient):
    """RESP over TCP; the kernel scatters replies to their place. Option `window` for match."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._keys = [_bulk(name) for name in seat.names(0, seat.blocks)]
        self._length = b"$%d\r\n" % seat.block_bytes
        self._window = int(seat.options.get("window", "1"))
        names = b"".join(self._keys)
        self._exists = (_command("EXISTS", seat.blocks) + names) * self._window

    def putting(self, first: int, blocks: int) -> Call:
        """One MSET."""
        pieces: list[bytes | memoryview] = [_command("MSET", 2 * blocks)]
        for block in range(first, first + blocks):
            pieces += (self._keys[block] + self._length, self.seat.sent(block), CRLF)
        return partial(self._send, pieces, b"+OK\r\n")

    def getting(self, first: int, blocks: int) -> Call:
        """One MGET."""
        asked = _command("MGET", blocks) + b"".join(self._keys[first : first + blocks])
        texts = [b"*%d\r\n" % blocks + self._length]
        texts += [CRLF + self._length] * (blocks - 1) + [CRLF]
        got = [bytearray(len(text)) for text in texts]
        pieces: list[bytearray | memoryview] = [got[0]]
        for block, text in enumerate(got[1:], first):
            pieces += (self.seat.landed(block), text)
        return partial(self._receive, asked, pieces, got, texts)

    def repeat(self, op: str, turn: int) -> tuple[int, range]:
        """`match`: one EXISTS of all keys, `window` of them in flight."""
        if op != "match":
            return super().repeat(op, turn)
        self._link.sendall(self._exists)
        self._expect((b":%d\r\n" % self.seat.blocks) * self._window)
        return self._window, range(0)

    def close(self) -> None:
        """Delete by name, and close the connection."""
        self._link.sendall(_command("DEL", len(self._keys)) + b"".join(self._keys))
        self._link.recv(64)
        self._link.close()


def _command(name: str, arguments: int) -> bytes:
    return b"*%d\r\n" % (arguments + 1) + _bulk(name)


def _bulk(text: str) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text.encode())
