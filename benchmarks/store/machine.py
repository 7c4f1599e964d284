"""What the figures were taken on, as far as it explains them."""

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvstore._core import crc32c_backend

__all__ = ["facts", "told"]


def facts(loops_ms: Sequence[float]) -> dict[str, Any]:
    """The machine, and how long a fixed loop took on it while the figures were taken."""
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


def told(machine: dict[str, Any]) -> str:
    """The same in a sentence or two."""
    least, middle, most = machine["loop_ms"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, Linux "
        f"{machine['kernel']}, CRC32C by {machine['crc32c']}. A fixed loop took {least:.0f} to "
        f"{most:.0f} ms, median {middle:.0f}: where they differ, others used the machine."
    )
