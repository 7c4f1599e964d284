"""The machine on which the figures were measured."""

import math
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvrouter_store._core import crc32c_backend

__all__ = ["Halves", "facts", "sentence"]


@dataclass(frozen=True)
class Halves:
    """The cores of the servers and those of the clients, equal for all stores.

    Otherwise the kernel puts a client and its server on one core in one round and on two in the
    next, and a call takes half as long on one.
    """

    servers: tuple[int, ...]
    clients: tuple[int, ...]

    @classmethod
    def pick(cls) -> "Halves":
        """Half of the cores for each; clients get the odd one. They share a single core."""
        usable = sorted(os.sched_getaffinity(0))
        half = math.ceil(len(usable) / 2)
        return cls(servers=tuple(usable[half:] or usable), clients=tuple(usable[:half]))

    def __str__(self) -> str:
        return f"servers on {_cores(self.servers)}, clients on {_cores(self.clients)}"


def _cores(cores: Sequence[int]) -> str:
    return f"core{'s' * (len(cores) > 1)} {', '.join(map(str, cores))}"


def facts(loops_ms: Sequence[float]) -> dict[str, Any]:
    """The machine, and the time of a fixed loop on it during the measurement."""
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "huge_pages": huge.read_text().strip() if huge.exists() else "",
        "python": platform.python_version(),
        "crc32c": crc32c_backend(),
        "loop_ms": [round(ms, 2) for ms in (min(loops_ms), median(loops_ms), max(loops_ms))],
    }


def sentence(machine: dict[str, Any]) -> str:
    """The facts in a sentence or two."""
    least, middle, most = machine["loop_ms"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, Linux "
        f"{machine['kernel']}, CRC32C by {machine['crc32c']}. A fixed loop took {least:.0f} to "
        f"{most:.0f} ms, median {middle:.0f}: where they differ, others used the machine."
    )
