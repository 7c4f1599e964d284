"""What the host lacks for a pool, in sentences of advice; `advice` is a function of files alone.

Pages and NUMA nodes are a matter of placement.py.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ByteSize

from kvrouter_store import free_memory

MEMINFO: Final = free_memory.MEMINFO
LIMITS: Final = "/proc/self/limits"
FILES: Final = (*free_memory.FILES, LIMITS)


class Advice(NamedTuple):
    """One sentence, and how much it matters: a level of `logging`."""

    level: int
    sentence: str


def read_files(root: Path = Path("/")) -> dict[str, str]:
    """The contents of those of FILES that can be read."""
    return free_memory.read_files(FILES, root)


def advice(files: Mapping[str, str], pool_bytes: int, *, set_aside: bool = False) -> list[Advice]:
    """What to do about memory and its pinning for a pool of this size.

    A missing file is no evidence of a lack. `set_aside`: the pool takes huge pages that the host
    has set aside, and no free memory.
    """
    return [*([] if set_aside else _memory(files, pool_bytes)), *_pinning(files, pool_bytes)]


def _memory(files: Mapping[str, str], pool_bytes: int) -> Iterator[Advice]:
    free = free_memory.free_bytes(files)
    if free is not None and free < pool_bytes:
        yield Advice(
            logging.WARNING,
            f"a pool of {_size(pool_bytes)} does not fit into the {_size(free)} of memory "
            "that are free here, and the kernel ends processes when it fills: give a smaller "
            "--memory",
        )


def _pinning(files: Mapping[str, str], pool_bytes: int) -> Iterator[Advice]:
    limit = re.search(r"^Max locked memory\s+(\S+)", files.get(LIMITS, ""), re.MULTILINE)
    if limit and limit[1].isdecimal() and int(limit[1]) < pool_bytes:
        yield Advice(
            logging.INFO,
            f"the memlock limit of {_size(int(limit[1]))} is less than the pool, so that engines "
            "under it cannot pin what they map: raise it with `ulimit -l unlimited` or "
            "LimitMEMLOCK=infinity",
        )


def _size(size_bytes: int) -> str:
    return ByteSize(size_bytes).human_readable()
