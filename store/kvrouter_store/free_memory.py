"""How much memory is free, for processes that take a large part of it at once."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

MEMINFO: Final = "/proc/meminfo"
CGROUP: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
FILES: Final = (MEMINFO, *(path for two in CGROUP for path in two))


def read_files(names: Iterable[str] = FILES, root: Path = Path("/")) -> dict[str, str]:
    """The contents of those files that can be read."""
    found = {}
    for name in names:
        try:
            found[name] = (root / name.lstrip("/")).read_text()
        except OSError:
            continue
    return found


def free_bytes(files: Mapping[str, str]) -> int | None:
    """What this process may take without being killed; None where no file says so."""
    rooms = [room for room in (_available(files), _left_in_cgroup(files)) if room is not None]
    return min(rooms, default=None)


def _available(files: Mapping[str, str]) -> int | None:
    kib = re.search(r"^MemAvailable:\s+(\d+) kB", files.get(MEMINFO, ""), re.MULTILINE)
    return int(kib[1]) * 1024 if kib else None


def _left_in_cgroup(files: Mapping[str, str]) -> int | None:
    for limit, usage in CGROUP:
        most = files.get(limit, "").strip()
        if most.isdecimal():  # not "max"
            used = files.get(usage, "").strip()
            return max(0, int(most) - (int(used) if used.isdecimal() else 0))
    return None
