"""The floor of shared memory: a copy within the client, plain or fused with CRC32C."""

from benchmarks.store.contender import BATCH_BLOCKS, Contender, Memory, Seat
from kvstore._core import copy_crc32c


class Copy(Contender):
    """Memory to memory. Option `digest`: 'crc32c' or 'none'."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._far = Memory(seat.block_bytes * seat.blocks)
        self._fused = seat.options["digest"] == "crc32c"

    def put(self, first: int, blocks: int) -> None:
        """Copy out."""
        self._copy(self._far.view, self.seat.source.view, first, blocks)

    def get(self, first: int, blocks: int) -> None:
        """Copy in."""
        self._copy(self.seat.landing.view, self._far.view, first, blocks)

    def repeat(self, op: str, turn: int) -> tuple[int, range]:
        """`mix`: blocks out, and the same blocks in. The unit is a block."""
        if op != "mix":
            return super().repeat(op, turn)
        first = turn * BATCH_BLOCKS % self.seat.blocks
        self.put(first, BATCH_BLOCKS)
        self.get(first, BATCH_BLOCKS)
        return 2 * BATCH_BLOCKS, range(first, first + BATCH_BLOCKS)

    def _copy(self, to: memoryview, source: memoryview, first: int, blocks: int) -> None:
        size = self.seat.block_bytes
        for at in range(first * size, (first + blocks) * size, size):
            if self._fused:
                copy_crc32c(to[at : at + size], source[at : at + size])
            else:
                to[at : at + size] = source[at : at + size]
