"""Mooncake's store over TCP, with its own client, in its own environment.

Buffers are registered, calls of many blocks are its batch calls, nothing is copied in Python.

Its storage node: `python -m benchmarks.store.contenders.mooncake HOST METADATA_URL MASTER
SEGMENT_BYTES` holds a segment until standard input ends. Prints "ready 0" when it is mounted.
"""

import sys
from functools import partial

from mooncake.store import MooncakeDistributedStore

from benchmarks.store.contender import Call, Contender, Seat

LOCAL_BUFFER_BYTES = 64 << 20


class Mooncake(Contender):
    """A client without a segment of its own: blocks are on the storage node."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        server, used = seat.server, seat.block_bytes * seat.blocks
        self._store = MooncakeDistributedStore()
        # The address that it takes for itself has a port that it chooses.
        failed = self._store.setup(
            server["host"], server["metadata"], 0, LOCAL_BUFFER_BYTES, "tcp", "", server["master"]
        )
        for memory in (seat.source, seat.landing):
            failed = failed or self._store.register_buffer(memory.address, used)
        if failed:
            raise RuntimeError(f"Mooncake's client cannot be set up: {failed}")
        self._names = seat.names(0, seat.blocks)

    def putting(self, first: int, blocks: int) -> Call:
        """One call, a batch for several blocks."""
        names, at, sizes = self._arguments(self.seat.source.address, first, blocks)
        if blocks == 1:
            return partial(self._store.put_from, names[0], at[0], sizes[0])
        return partial(self._store.batch_put_from, names, at, sizes)

    def getting(self, first: int, blocks: int) -> Call:
        """One call, a batch for several blocks."""
        names, at, sizes = self._arguments(self.seat.landing.address, first, blocks)
        if blocks == 1:
            return partial(self._store.get_into, names[0], at[0], sizes[0])
        return partial(self._store.batch_get_into, names, at, sizes)

    def answer(self, op: str, blocks: int) -> object:
        """For each block, the status of a put, or the bytes that a get read."""
        done = 0 if op == "put" else self.seat.block_bytes
        return done if blocks == 1 else [done] * blocks

    def forget(self) -> None:
        """Delete the blocks: a put of an existing key does nothing."""
        self._store.batch_remove(self._names, True)

    def close(self) -> None:
        """Release the memory, and close the connection."""
        for memory in (self.seat.source, self.seat.landing):
            self._store.unregister_buffer(memory.address)
        self._store.close()

    def _arguments(
        self, base: int, first: int, blocks: int
    ) -> tuple[list[str], list[int], list[int]]:
        size = self.seat.block_bytes
        at = [base + block * size for block in range(first, first + blocks)]
        return self._names[first : first + blocks], at, [size] * blocks


def main() -> int:
    """Exit status 1 if the node cannot be set up."""
    host, metadata, master, segment = sys.argv[1:]
    store = MooncakeDistributedStore()
    failed = store.setup(host, metadata, int(segment), LOCAL_BUFFER_BYTES, "tcp", "", master)
    if failed:
        print("setup failed:", failed, file=sys.stderr)
        return 1
    print("ready 0", flush=True)
    sys.stdin.read()
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
