"""The KV memory of a simulated engine: slots of one block each. Knows no names."""

from collections.abc import Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

from kvrouter.tools.sim.kv_bytes import kv_of_block
from kvrouter_store._core import Segments


class KVMemory:
    """`blocks` slots of `block_bytes` bytes; a page takes memory only once it is written."""

    def __init__(self, spec_digest: bytes, blocks: int, block_bytes: int) -> None:
        self._spec_digest = spec_digest
        self._memory = mmap(-1, blocks * block_bytes, MAP_PRIVATE | MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        self.block_bytes = block_bytes
        self.segments = Segments.over(self._memory, block_bytes, writable=True)

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot."""
        return self._view[index * self.block_bytes : (index + 1) * self.block_bytes]

    def compute(self, slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Fill slots with the KV of these hashes, as a forward pass does."""
        for index, block_hash in zip(slots, hashes, strict=True):
            self.slot(index)[:] = kv_of_block(self._spec_digest, block_hash, self.block_bytes)

    def right_blocks(self, slots: Sequence[int], hashes: Sequence[bytes]) -> int:
        """How many leading slots hold exactly the KV of their hashes."""
        for count, (index, block_hash) in enumerate(zip(slots, hashes, strict=True)):
            if self.slot(index) != kv_of_block(self._spec_digest, block_hash, self.block_bytes):
                return count
        return len(slots)
