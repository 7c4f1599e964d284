"""How copies are cut into lists that a queue takes. Nothing here does I/O."""

from collections.abc import Iterator, Sequence

from kvrouter_store.rdma.base import Copy

__all__ = ["lists_of"]


def lists_of(copies: Sequence[Copy], size: int, longest: int) -> Iterator[Sequence[Copy]]:
    """Lists of at most `size` copies, each of at most `longest` bytes, in their order.

    Raises ValueError for a copy of no bytes, which a device would take for one of 2 GiB.
    """
    short = copies if all(0 < copy.length <= longest for copy in copies) else cut(copies, longest)
    for first in range(0, len(short), size):
        yield short[first : first + size]


def cut(copies: Sequence[Copy], longest: int) -> list[Copy]:
    """The same bytes in copies of at most `longest`."""
    short: list[Copy] = []
    for copy in copies:
        if copy.length < 1:
            raise ValueError(f"a copy has at least one byte, not {copy.length}")
        for done in range(0, copy.length, longest):
            short.append(
                Copy(
                    copy.local_address + done,
                    copy.lkey,
                    copy.remote_address + done,
                    copy.rkey,
                    min(longest, copy.length - done),
                )
            )
    return short
