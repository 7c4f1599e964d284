"""The lower bound of shared memory: a copy within the client, plain or fused with CRC32C."""

import operator
from functools import partial

from benchmarks.store.contender import BATCH_BLOCKS, Call, Contender, Memory, Seat, in_turn
from kvrouter_store._core import copy_crc32c


class Copy(Contender):
    """Memory to memory. Option `digest`: 'crc32c' or 'none'."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._far = Memory(seat.block_bytes * seat.blocks)
        self._fused = seat.options["digest"] == "crc32c"

    def putting(self, first: int, blocks: int) -> Call:
        """Copy out."""
        return self._copying(self._far.view, self.seat.source.view, first, blocks)

    def getting(self, first: int, blocks: int) -> Call:
        """Copy in."""
        return self._copying(self.seat.landing.view, self._far.view, first, blocks)

    def look(self, op: str, blocks: int, answer: object) -> None:
        """Do nothing: a copy returns its digest, or None."""

    def repeat(self, op: str, turn: int) -> tuple[int, range]:
        """`mix`: blocks out, and the same blocks in. The unit is a block."""
        if op != "mix":
            return super().repeat(op, turn)
        first = turn * BATCH_BLOCKS % self.seat.blocks
        self.put(first, BATCH_BLOCKS)
        self.get(first, BATCH_BLOCKS)
        return 2 * BATCH_BLOCKS, range(first, first + BATCH_BLOCKS)

    def _copying(self, to: memoryview, source: memoryview, first: int, blocks: int) -> Call:
        size = self.seat.block_bytes
        places = [slice(at, at + size) for at in range(first * size, (first + blocks) * size, size)]
        if self._fused:
            return in_turn([partial(copy_crc32c, to[place], source[place]) for place in places])
        return in_turn([partial(operator.setitem, to, place, source[place]) for place in places])
