"""The memory of the tier side: values are here on their way between tiers and the node."""

import asyncio
import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter_store.tiers.base import Memory

CHUNKS = 4
"""How many batches of blocks can be on their way at a time."""


class Staging:
    """`size` bytes in CHUNKS equal chunks, which their users take and give back. One event loop."""

    def __init__(self, size: int) -> None:
        self.chunk_bytes = size // CHUNKS // mmap.PAGESIZE * mmap.PAGESIZE
        self._fd = os.memfd_create("kvrouter-tiers", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self.chunk_bytes * CHUNKS)
        self.memory = Memory.of(self._fd)
        self._free = [at * self.chunk_bytes for at in range(CHUNKS)]
        self._turns = asyncio.Semaphore(CHUNKS)

    @asynccontextmanager
    async def chunk(self) -> AsyncIterator[int]:
        """The place of a chunk that nobody else has; waits for one.

        What runs inside must not end before the last access to the chunk: see Tier, and `complete`.
        """
        async with self._turns:
            at = self._free.pop()
            try:
                yield at
            finally:
                self._free.append(at)

    def close(self) -> None:
        """Give the descriptor back. The memory goes with the last that refers to it."""
        os.close(self._fd)
