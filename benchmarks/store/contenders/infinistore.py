"""InfiniStore over TCP, by its own client, in its own environment.

It has no batches over TCP: a call of many blocks is that many round trips. It hands a block out in
memory of its own, so a get copies it to where it is wanted.
"""

import ctypes

import infinistore

from benchmarks.store.contender import Contender, Seat

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

    def put(self, first: int, blocks: int) -> None:
        """One round trip per block."""
        size, base = self.seat.block_bytes, self.seat.source.address
        for block in range(first, first + blocks):
            self._connection.tcp_write_cache(self._names[block], base + block * size, size)

    def get(self, first: int, blocks: int) -> None:
        """One round trip and one copy per block."""
        size, base = self.seat.block_bytes, self.seat.landing.address
        for block in range(first, first + blocks):
            got = self._connection.tcp_read_cache(self._names[block])
            if got.nbytes != size:
                raise RuntimeError(f"{got.nbytes} bytes came instead of {size}")
            ctypes.memmove(base + block * size, got.ctypes.data, size)

    def repeat(self, op: str, turn: int) -> tuple[int, range]:
        """`match`: the last index that is there."""
        if op != "match":
            return super().repeat(op, turn)
        last = self._connection.get_match_last_index(self._names)
        if last != len(self._names) - 1:
            raise RuntimeError(f"the last index is {last}")
        return 1, range(0)

    def forget(self) -> None:
        """A put of a key that is there is another path; what is measured is new blocks."""
        self._connection.delete_keys(self._names)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
