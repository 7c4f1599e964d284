"""How much memory this host and its cgroups leave, for processes that take much of it at once."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

Read = Callable[[str], str]
MEMINFO: Final = "/proc/meminfo"
CGROUPS: Final = "/proc/self/cgroup"
LIMITS: Final = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""A cgroup's limit of memory and what it uses, in v2 and in v1."""


def reader(root: Path = Path("/")) -> Read:
    """A function that reads files under `root` by their path; "" for one that cannot be read."""

    def read(name: str) -> str:
        try:
            return (root / name.lstrip("/")).read_text()
        except OSError:
            return ""

    return read


def free_bytes(read: Read) -> int | None:
    """What this process may take without being killed; None where no file says so."""
    rooms = [max(0, most - used) for most, used in _limits(read)]
    available = _meminfo(read, "MemAvailable")
    return min(rooms if available is None else [*rooms, available], default=None)


def limit_bytes(read: Read) -> int | None:
    """The least limit of its cgroups (a container's, a unit's) for all their processes together."""
    return min((most for most, _ in _limits(read)), default=None)


def cgroup_folders(read: Read, controller: str) -> Iterator[str]:
    """The cgroups of this process that may limit what the controller counts, and their parents.

    In a container the paths may be its host's, and then name nothing: its own is the root.
    """
    for line in read(CGROUPS).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in {"", controller}:
            continue
        base = "/sys/fs/cgroup" + (f"/{kinds}" if kinds else "")
        inner = Path(path.lstrip("/"))
        for each in (inner, *inner.parents):
            yield f"{base}/{each}" if each.parts else base


def _limits(read: Read) -> Iterator[tuple[int, int]]:
    """Limits of memory with what is used of each, less what the kernel takes back at once."""
    total = _meminfo(read, "MemTotal")
    for folder in cgroup_folders(read, "memory"):
        for limit, usage in LIMITS:
            most, used = read(f"{folder}/{limit}").strip(), read(f"{folder}/{usage}").strip()
            if most.isdecimal() and (total is None or int(most) < total):  # else it is none
                stat = read(f"{folder}/memory.stat")
                cache = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
                yield int(most), int(used or 0) - max(map(int, cache), default=0)


def _meminfo(read: Read, name: str) -> int | None:
    kib = re.search(rf"^{name}:\s+(\d+) kB", read(MEMINFO), re.MULTILINE)
    return int(kib[1]) * 1024 if kib else None
