"""The blocks of a lease, as a client brings them where they cannot be read in place."""

from typing import TYPE_CHECKING

from kvrouter_store._core import BlockStatus, Segments
from kvrouter_store.client.ranges import hashes_of
from kvrouter_store.errors import CorruptBlock
from kvrouter_store.identity.block import Manifest

if TYPE_CHECKING:
    from kvrouter_store.client.blocking import StoreClient

__all__ = ["LeasedBlocks"]


class LeasedBlocks:
    """What a lease asks for where the pool is not mapped, and where a digest is wrong."""

    def __init__(self, client: "StoreClient", manifest: Manifest, hashes: bytes) -> None:
        self.deadline_s = client.deadline_s
        self._client = client
        self._manifest = manifest
        self._hashes = hashes

    def part_bytes(self, part: int) -> int:
        """Of each block."""
        return self._manifest.parts[part].block_bytes

    def fetch(self, part: int, index: int) -> memoryview:
        """A copy of one part of a block. Raises CorruptBlock where it cannot be had."""
        size = self._manifest.parts[part].block_bytes
        buffer = bytearray(size)
        segments = Segments.over(buffer, size, writable=True)
        span = range(index, index + 1)
        status = self._client.get_into(self._manifest, part, self._hashes, span, segments, [0])
        if status != [BlockStatus.OK]:
            raise CorruptBlock(f"block {index} could not be read back: {status[0].name}")
        return memoryview(buffer).toreadonly()

    def discard(self, index: int) -> None:
        """Have the node forget a block."""
        self._client.delete(self._manifest, hashes_of(self._hashes, range(index, index + 1)))
