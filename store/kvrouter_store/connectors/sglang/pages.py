"""Where pages of SGLang's host memory are, as the store's client takes them. Moves no bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

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
