"""memcached, with the cheapest possible client in Python: it knows the replies.

The sets of a call are sent together, its gets are one; replies are scattered to their place.
"""

from functools import partial

from benchmarks.store.contender import Call, Seat, TextClient

__all__ = ["Memcached"]

CRLF = b"\r\n"
STORED = b"STORED\r\n"
END = b"\r\nEND\r\n"


class Memcached(TextClient):
    """The text protocol over TCP."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._names = [name.encode() for name in seat.names(0, seat.blocks)]
        self._tail = b" 0 %d\r\n" % seat.block_bytes

    def putting(self, first: int, blocks: int) -> Call:
        """One set for each block, sent together."""
        pieces: list[bytes | memoryview] = []
        for block in range(first, first + blocks):
            head = b"set " + self._names[block] + b" 0" + self._tail
            pieces += (head, self.seat.sent(block), CRLF)
        return partial(self._send, pieces, STORED * blocks)

    def getting(self, first: int, blocks: int) -> Call:
        """One get of all keys."""
        names = self._names[first : first + blocks]
        asked = b"get " + b" ".join(names) + CRLF
        heads = [b"VALUE " + name + self._tail for name in names]
        texts = [heads[0], *(CRLF + head for head in heads[1:]), END]
        got = [bytearray(len(text)) for text in texts]
        pieces: list[bytearray | memoryview] = [got[0]]
        for block, text in enumerate(got[1:], first):
            pieces += (self.seat.landed(block), text)
        return partial(self._receive, asked, pieces, got, texts)

    def close(self) -> None:
        """Delete by name, and close the connection."""
        for name in self._names:
            self._link.sendall(b"delete " + name + CRLF)
            self._expect(b"DELETED\r\n")
        self._link.close()
