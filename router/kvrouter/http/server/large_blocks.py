"""Memory of large bodies, which goes back to the system."""

import ctypes
from typing import Final

LARGE_BYTES: Final = 256 << 10


def return_large_blocks() -> None:
    """From now on a freed block of LARGE_BYTES and more is the system's again, not this process's.

    glibc would learn from the first of them to keep blocks of up to 32 MiB, in between small ones
    that live on. Other C libraries know no such thing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, LARGE_BYTES)  # M_MMAP_THRESHOLD
