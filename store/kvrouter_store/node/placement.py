"""What this host has for a pool: memory, pages and NUMA nodes, and what the log says of them.

`plan` and `advice` are functions of files alone, `placement_notes` of the plan and what the node
got.
"""

import errno
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from pydantic import ByteSize

from kvrouter_store._core import Placed, Placement
from kvrouter_store.free_memory import Read, cgroup_folders, free_bytes

HugePages = Literal["auto", "on", "off"]
Numa = Literal["auto", "off"]
KIB: Final = 1024
HUGETLB: Final = "/sys/kernel/mm/hugepages/hugepages-{kib}kB/"
NODE_HUGETLB: Final = "/sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB/"
THP: Final = "/sys/kernel/mm/transparent_hugepage/"
SHMEM_MODE: Final = THP + "shmem_enabled"
BY_TOUCH: Final = frozenset({"always", "within_size", "advise", "force"})
NODES: Final = "/sys/devices/system/node/has_memory"
STATUS: Final = "/proc/self/status"
LOCK_LIMITS: Final = "/proc/self/limits"
# What a page that rounds the pool up may add to it unasked, as a divisor.
MOST_WASTE: Final = 8
# Limits of a cgroup and what they bound, in v2 and in v1: pages in use, and those reserved.
LIMITS: Final = (
    ("max", "current"),
    ("rsvd.max", "rsvd.current"),
    ("limit_in_bytes", "usage_in_bytes"),
    ("rsvd.limit_in_bytes", "rsvd.usage_in_bytes"),
)


class Advice(NamedTuple):
    """One sentence, and how much it matters: a level of `logging`."""

    level: int
    sentence: str


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """What a pool is to be made of.

    Args:
        placement: for the server.
        refusal: why the node must not start, with the remedy; "" where it may.
        lack: why the pool gets no huge pages, or not the wanted ones, with the remedy; "" for none.
    """

    placement: Placement
    refusal: str = ""
    lack: str = ""

    @property
    def explicit(self) -> bool:
        """Whether the pool is to take huge pages that the host has set aside."""
        return self.placement.explicit_page_bytes > 0


def plan(
    read: Read, pool_bytes: int, huge_pages: HugePages, numa: Numa, *, prefault: bool
) -> PlacementPlan:
    """What this host can give a pool of that size."""
    nodes = memory_nodes(read)
    wanted = nodes if numa == "auto" and len(nodes) > 1 else []
    if huge_pages == "off":
        return PlacementPlan(Placement(numa_nodes=wanted))
    page, lack, remedy = _explicit_pages(read, pool_bytes, nodes, may_waste=huge_pages == "on")
    if huge_pages == "on":
        refusal = f"{lack}: {remedy}, or give --huge-pages auto" if lack else ""
        placed = Placement(explicit_page_bytes=page, explicit_only=True, numa_nodes=wanted)
        return PlacementPlan(placed, refusal)
    huge, by_touch, why = _transparent_pages(read)
    if huge and not by_touch and not prefault:
        huge = 0
        remedy += f", or `echo advise > {SHMEM_MODE}`, or give --prefault"
    placed = Placement(
        explicit_page_bytes=0 if lack else page,
        transparent_page_bytes=huge,
        transparent_by_touch=by_touch,
        numa_nodes=wanted,
    )
    return PlacementPlan(placed, lack="" if huge or not lack else f"{lack}, {why}: {remedy}")


def placement_notes(plan: PlacementPlan, placed: Placed) -> Iterator[Advice]:
    """What the log says of the pages that the pool got, and of its NUMA nodes."""
    size = _size(placed.page_bytes)
    if placed.pages == "explicit":
        pages = f"the pool has huge pages of {size} that this host had set aside"
    elif placed.pages == "transparent":
        pages = f"the pool has transparent huge pages of {size}"
        if placed.huge_error:
            pages += (
                f", but not everywhere ({os.strerror(placed.huge_error)}): "
                "`sysctl vm.compact_memory=1` as root before the start makes room for more"
            )
    else:
        pages = f"the pool has pages of {size}"
        if plan.lack:
            pages += f": {plan.lack}"
        elif placed.huge_error:
            pages += f": the kernel refuses huge ones ({os.strerror(placed.huge_error)})"
    yield Advice(logging.INFO, pages)
    yield from _numa_notes(plan.placement.numa_nodes, placed.numa_error, placed.numa_regions)


def _numa_notes(nodes: list[int], error: int, regions: int) -> Iterator[Advice]:
    if not nodes:
        return
    if regions:
        names = ", ".join(map(str, nodes))
        yield Advice(logging.INFO, f"the pool is divided among the NUMA nodes {names}")
        return
    why = f"mbind: {os.strerror(error)}" if error else "it is too small to be divided"
    remedy = (
        "in a container, give it the capability SYS_NICE"
        if error in {errno.EPERM, errno.ENOSYS}
        else "run a store node for each under `numactl --cpunodebind=N --membind=N`"
    )
    yield Advice(
        logging.INFO,
        f"this host has {len(nodes)} NUMA nodes and the pool is bound to none ({why}): {remedy}",
    )


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
    limit = re.search(r"^Max locked memory\s+(\S+)", read(LOCK_LIMITS), re.MULTILINE)
    if limit and limit[1].isdecimal() and int(limit[1]) < pool_bytes:
        yield Advice(
            logging.INFO,
            f"the memlock limit of {_size(int(limit[1]))} is less than the pool, so that engines "
            "under it cannot pin what they map: raise it with `ulimit -l unlimited` or "
            "LimitMEMLOCK=infinity",
        )


def memory_nodes(read: Read) -> list[int]:
    """The NUMA nodes with memory that this process may use; none where the kernel lists none."""
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", read(STATUS), re.MULTILINE)
    nodes = _numbers(read(NODES))
    return sorted(nodes & _numbers(allowed[1]) if allowed else nodes)


def _explicit_pages(
    read: Read, pool_bytes: int, nodes: list[int], *, may_waste: bool
) -> tuple[int, str, str]:
    """The size of the host's huge pages; why the pool cannot have them, and what helps."""
    found = re.search(r"^Hugepagesize:\s+(\d+) kB", read("/proc/meminfo"), re.MULTILINE)
    if found is None:
        return 0, "this kernel has no huge pages to set aside", "take one with CONFIG_HUGETLBFS"
    kib = int(found[1])
    page = kib * KIB
    pages = -(-pool_bytes // page)
    if not may_waste and (pages * page - pool_bytes) * MOST_WASTE > pool_bytes:
        lack = f"a pool of this size is no multiple of huge pages of {_size(page)}"
        return page, lack, "give another --memory"
    needs = f"a pool of this size takes {pages} huge pages of {_size(page)}"
    free, total = _free_pages(read, kib, nodes)
    if pages > free:
        lack = f"{needs}, of which {free} are free"
        return page, lack, f"as root, `sysctl vm.nr_hugepages={total + pages - free}`"
    room = min(_cgroup_rooms(read, page), default=pages)
    if pages > room:
        lack = f"{needs}, of which the cgroup may have {room}"
        return page, lack, f"raise hugetlb.{_cgroup_name(page)}.max of the cgroup"
    return page, "", ""


def _free_pages(read: Read, kib: int, nodes: list[int]) -> tuple[int, int]:
    """Huge pages that are free for this process, and all that there are."""
    folder = HUGETLB.format(kib=kib)

    def number(name: str) -> int:
        return _number(read(folder + name))

    free = number("free_hugepages") - number("resv_hugepages")
    on_nodes = [read(NODE_HUGETLB.format(node=n, kib=kib) + "free_hugepages") for n in nodes]
    if all(on_nodes) and on_nodes:
        free = min(free, sum(map(_number, on_nodes)))
    more = number("nr_overcommit_hugepages") - number("surplus_hugepages")
    return max(0, free) + max(0, more), number("nr_hugepages")


def _cgroup_rooms(read: Read, page: int) -> Iterator[int]:
    """How many huge pages each limit leaves: touching one beyond it is a SIGBUS."""
    name = _cgroup_name(page)
    for folder in cgroup_folders(read, "hugetlb"):
        for limit, usage in LIMITS:
            most = read(f"{folder}/hugetlb.{name}.{limit}").strip()
            if most.isdecimal():  # not "max"
                used = _number(read(f"{folder}/hugetlb.{name}.{usage}"))
                yield max(0, int(most) - used) // page


def _transparent_pages(read: Read) -> tuple[int, bool, str]:
    """Their size (0: none), whether shared memory gets them by touch, and why not."""
    size = _number(read(THP + "hpage_pmd_size"))
    mode = _chosen(read(SHMEM_MODE))
    if not size or not mode:
        return 0, False, "and this kernel makes none by itself for shared memory"
    if mode == "deny":
        return 0, False, f"and transparent ones are off for shared memory ({mode})"
    own = _chosen(read(f"{THP}hugepages-{size // KIB}kB/shmem_enabled"))
    if mode != "force" and own not in {"", "inherit"}:
        mode = own
    return size, mode in BY_TOUCH, f"and transparent ones are off for shared memory ({mode})"


def _chosen(modes: str) -> str:
    found = re.search(r"\[(\w+)\]", modes)
    return found[1] if found else ""


def _numbers(spans: str) -> set[int]:
    found = re.findall(r"(\d+)(?:-(\d+))?", spans)
    return {n for first, last in found for n in range(int(first), int(last or first) + 1)}


def _number(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0


def _cgroup_name(page: int) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB")):
        if page >= unit:
            return f"{page // unit}{name}"
    return f"{page // KIB}KB"


def _size(size_bytes: int) -> str:
    return ByteSize(size_bytes).human_readable()
