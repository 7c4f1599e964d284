"""Where pages of SGLang's host memory are, as the store's client takes them. Moves no bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Self

from kvrouter_store._core import Segments


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages in memory: page i is the block of `segments` at `indices[i]`. Keeps nothing alive."""

    segments: Segments
    indices: list[int]


def pages_at(addresses: Sequence[int], sizes: Sequence[int], count: int, page_bytes: int) -> Pages:
    """Where `count` pages of `page_bytes` are, given their pieces one after another.

    addresses, sizes: of all pieces, page by page, as SGLang's `get_page_buffer_meta` says it.
    Raises ValueError where the pages do not all have equal pieces at equal distances.
    """
    pieces, rest = divmod(len(addresses), count)
    if rest or not pieces or len(sizes) != len(addresses):
        raise ValueError(f"{count} pages of {len(addresses)} addresses and {len(sizes)} sizes")
    starts = addresses[::pieces]
    lowest = min(range(count), key=starts.__getitem__) * pieces
    bases, shape = list(addresses[lowest : lowest + pieces]), list(sizes[:pieces])
    if sum(shape) != page_bytes:
        raise ValueError(f"a page of {sum(shape)} bytes, not of {page_bytes} as it was registered")
    indices = [start - bases[0] for start in starts]
    for page, index in enumerate(indices):
        span = slice(page * pieces, (page + 1) * pieces)
        if list(sizes[span]) != shape or list(addresses[span]) != [at + index for at in bases]:
            raise ValueError(f"page {page} lies otherwise than the others")
    return Pages(Segments(bases, [1] * pieces, shape), indices)


class PoolMemory:
    """Pages of one host pool of SGLang, as `pages_at` has them. Safe in threads.

    start, size: of all of the pool. Its pages have the same segments each time: an RDMA device
    registers them once, instead of the memory between the pages of each transfer.
    """

    def __init__(self, start: int, size: int) -> None:
        self._start, self._size = start, size
        self._segments: Segments | None = None

    @classmethod
    def of(cls, pool: Any) -> Self:
        """Of SGLang's pool; one that is not in one tensor has segments of its own each time."""
        buffer: Any = getattr(pool, "kv_buffer", None)
        if not hasattr(buffer, "data_ptr"):
            return cls(0, 0)
        return cls(buffer.data_ptr(), buffer.numel() * buffer.element_size())

    def pages_at(
        self, addresses: Sequence[int], sizes: Sequence[int], count: int, page_bytes: int
    ) -> Pages:
        """Where pages are. Raises ValueError as `pages_at`."""
        pages = pages_at(addresses, sizes, count, page_bytes)
        found = pages.segments
        shift = found.bases[0] - self._start
        bases = [base - shift for base in found.bases]
        blocks = self._start + self._size - max(map(add, bases, found.sizes)) + 1
        indices = [index + shift for index in pages.indices]
        if min(bases) < self._start or min(indices) < 0 or max(indices) >= blocks:
            return pages
        whole = self._segments
        if whole is None or (whole.bases, whole.sizes) != (bases, found.sizes):
            whole = Segments(bases, found.strides, found.sizes, blocks=blocks)
            self._segments = whole
        return Pages(whole, indices)
