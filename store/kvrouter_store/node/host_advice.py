"""What the host lacks for a pool, in sentences of advice; `advice` is a function of files alone.

Pages and NUMA nodes are a matter of placement.py.
"""

import logging
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from pydantic import ByteSize

from kvrouter_store.free_memory import Read, free_bytes

LIMITS: Final = "/proc/self/limits"


class Advice(NamedTuple):
    """One sentence, and how much it matters: a level of `logging`."""

    level: int
    sentence: str


def advice(read: Read, pool_bytes: int, *, set_aside: bool = False) -> list[Advice]:
    """What to do about memory and its pinning for a pool of this size.

    A missing file is no evidence of a lack. `set_aside`: the pool takes huge pages that the host
    has set aside, and no free memory.
    """
    return [*([] if set_aside else _memory(read, pool_bytes)), *_pinning(read, pool_bytes)]


def _memory(read: Read, pool_bytes: int) -> Iterator[Advice]:
    free = free_bytes(read)
    if free is not None and free < pool_bytes:
        yield Advice(
            logging.WARNING,
            f"a pool of {_size(pool_bytes)} does not fit into the {_size(free)} of memory "
            "that are free here, and the kernel ends processes when it fills: give a smaller "
            "--memory, or its container a larger limit",
        )


def _pinning(read: Read, pool_bytes: int) -> Iterator[Advice]:
    limit = re.search(r"^Max locked memory\s+(\S+)", read(LIMITS), re.MULTILINE)
    if limit and limit[1].isdecimal() and int(limit[1]) < pool_bytes:
        yield Advice(
            logging.INFO,
            f"the memlock limit of {_size(int(limit[1]))} is less than the pool, so that engines "
            "under it cannot pin what they map: raise it with `ulimit -l unlimited` or "
            "LimitMEMLOCK=infinity",
        )


def _size(size_bytes: int) -> str:
    return ByteSize(size_bytes).human_readable()
