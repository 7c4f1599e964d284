"""Where LMCache's objects are in its memory (L1), as the store's client takes it."""

from collections.abc import Sequence

from kvrouter_store._core import Segments


class ObjectMemory:
    """The memory that LMCache keeps its objects in; nothing is copied. Safe in threads.

    start, size: of all of it; 0 where LMCache does not say it.
    """

    def __init__(self, start: int = 0, size: int = 0) -> None:
        self._start, self._size = start, size
        self._segments: dict[int, Segments] = {}

    def place(self, addresses: Sequence[int], size: int) -> tuple[Segments, list[int]]:
        """The memory of objects of `size` bytes at these addresses: segments, and an index each.

        Block i of them begins at byte i. They are the same each time where all of the memory is
        known: an RDMA device registers them once. Raises ValueError for an object outside of it.
        """
        if not self._size:
            first = min(addresses)
            segments = Segments([first], [1], [size], blocks=max(addresses) - first + 1)
            return segments, [address - first for address in addresses]
        indices = [address - self._start for address in addresses]
        if min(indices) < 0 or max(indices) + size > self._size:
            raise ValueError("an object lies outside of the memory that LMCache told of")
        if size not in self._segments:
            blocks = self._size - size + 1
            self._segments[size] = Segments([self._start], [1], [size], blocks=blocks)
        return self._segments[size], indices
