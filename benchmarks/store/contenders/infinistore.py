"""InfiniStore over TCP, with its own client, in its own environment.

It has no batches over TCP: a call of many blocks is that many round trips. It returns a block in
its own memory, so a get copies it to its place.
"""

import ctypes
from functools import partial

import infinistore

from benchmarks.store.contender import Call, Contender, Seat, in_turn

__all__ = ["InfiniStore"]


class InfiniStore(Contender):
    """A connection of its own for each client."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        config = infinistore.ClientConfig(
            host_addr=seat.server["host"],
            service_port=int(seat.server["port"]),
            connection_type=infinistore.TYPE_TCP,
            log_level="error",
        )
        self._connection = infinistore.InfinityConnection(config)
        self._connection.connect()
        self._names = seat.names(0, seat.blocks)

    def putting(self, first: int, blocks: int) -> Call:
        """One round trip per block."""
        write, base = self._connection.tcp_write_cache, self.seat.source.address
        return in_turn([partial(write, *self._at(base, b)) for b in range(first, first + blocks)])

    def getting(self, first: int, blocks: int) -> Call:
        """One round trip and one copy per block."""
        read, base = self._read, self.seat.landing.address
        return in_turn([partial(read, *self._at(base, b)) for b in range(first, first + blocks)])

    def repeat(self, op: str, turn: int) -> tuple[int, range]:
        """`match`: the last index that exists."""
        if op != "match":
            return super().repeat(op, turn)
        last = self._connection.get_match_last_index(self._names)
        if last != len(self._names) - 1:
            raise RuntimeError(f"the last index is {last}")
        return 1, range(0)

    def forget(self) -> None:
        """Delete the blocks: a put of an existing key takes another path."""
        self._connection.delete_keys(self._names)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def look(self, op: str, blocks: int, answer: object) -> None:
        """Do nothing: a call that fails raises."""

    def _at(self, base: int, block: int) -> tuple[str, int, int]:
        size = self.seat.block_bytes
        return self._names[block], base + block * size, size

    def _read(self, name: str, to: int, size: int) -> None:
        got = self._connection.tcp_read_cache(name)
        if got.nbytes != size:
            raise RuntimeError(f"{got.nbytes} bytes came instead of {size}")
        ctypes.memmove(to, got.ctypes.data, size)
