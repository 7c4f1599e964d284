"""Checks of this host: what it lets processes have, and the memory of a store that runs here."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Final

from pydantic import ByteSize

from kvrouter.tools.doctor.base import Found, Setup, each_node, remark, warning
from kvrouter_store.descriptors import RESERVED
from kvrouter_store.node.placement import memory_nodes, plan
from kvrouter_store.node.start_checks import is_loopback

if TYPE_CHECKING:
    from kvrouter.tools.doctor.store_facts import StoreFacts

HOST: Final = "this host"
DESCRIPTORS_PER_REQUEST: Final = 2
"""One to the client and one to an engine."""
MIN_LOCKED_BYTES: Final = 1 << 30
MIN_SHM_BYTES: Final = 64 << 20
LARGE_POOL_BYTES: Final = 1 << 30
"""A smaller pool gains nothing that can be measured from huge pages or NUMA."""


async def open_files(setup: Setup) -> Found:
    """This shell's `ulimit -Hn` is enough for the router."""
    limit = setup.host.limit(resource.RLIMIT_NOFILE)
    requests = setup.settings.max_concurrent_requests
    need = DESCRIPTORS_PER_REQUEST * requests + RESERVED
    if limit != resource.RLIM_INFINITY and limit < need:
        yield warning(
            HOST,
            f"a process may have {limit} descriptors, and {requests} requests at a time "
            f"(--max-concurrent-requests) need {need}: further connections are refused",
            f"raise it with `ulimit -Hn {need}` (LimitNOFILE={need} in a systemd unit), or lower "
            "--max-concurrent-requests",
        )


async def locked_memory(setup: Setup) -> Found:
    """With RDMA, `ulimit -l` lets it lock memory."""
    limit = setup.host.limit(resource.RLIMIT_MEMLOCK)
    enough = limit == resource.RLIM_INFINITY or limit >= MIN_LOCKED_BYTES
    if setup.host.has_rdma and not enough:
        yield warning(
            HOST,
            f"a process may lock {ByteSize(limit).human_readable()} of memory, and RDMA locks all "
            "that it reads and writes: engines and store nodes under this limit use TCP",
            "raise it with `ulimit -l unlimited` (LimitMEMLOCK=infinity in a systemd unit, "
            "`ulimits: memlock: -1` in compose)",
        )


async def shared_memory(setup: Setup) -> Found:
    """If engines run here, /dev/shm has room for the traffic between vLLM's workers."""
    if not any(is_loopback(each.engine.host) for each in await setup.all_engines()):
        return
    free = setup.host.shm_free_bytes()
    if free is not None and free < MIN_SHM_BYTES:
        yield warning(
            HOST,
            f"/dev/shm has {ByteSize(free).human_readable()} left, and engines of several GPUs on "
            "this host communicate through it: they hang or die when it is full",
            "delete what dead processes left there, or give containers --ipc=host or --shm-size",
        )


def _is_large_here(store: StoreFacts) -> bool:
    return store.here and store.stat("pool_bytes") >= LARGE_POOL_BYTES


@each_node
async def huge_pages(setup: Setup, store: StoreFacts) -> Found:
    """A large pool of a store on this host has huge pages."""
    if not _is_large_here(store) or not store.stat("page_bytes.small"):
        return
    lack = plan(setup.host.read, store.stat("pool_bytes"), "auto", "auto", prefault=False).lack
    reason, _, remedy = lack.partition(": ")
    yield remark(
        store.url,
        f"its pool consists of small pages{f': {reason}' if reason else ''}; copies are faster "
        "with huge ones",
        f"before the node starts, {remedy}"
        if reason
        else "this host has them now: restart the node",
    )


@each_node
async def numa(setup: Setup, store: StoreFacts) -> Found:
    """A large pool of a store on this host is spread over the NUMA nodes."""
    nodes = memory_nodes(setup.host.read)
    if _is_large_here(store) and len(nodes) > 1 and "numa_used_bytes.any" in store.stats:
        yield remark(
            store.url,
            f"this host has {len(nodes)} NUMA nodes, and the pool is bound to none of them",
            "give its container the capability SYS_NICE, or run a node for each under `numactl "
            "--cpunodebind=N --membind=N`",
        )
