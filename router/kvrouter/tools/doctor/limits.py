"""Checks of what this host lets processes have: descriptors, locked memory, shared memory."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Final

from pydantic import ByteSize

from kvrouter.tools.doctor.base import Check, SetUp, warning
from kvrouter_store.node.start_checks import is_loopback

if TYPE_CHECKING:
    from kvrouter.tools.doctor.base import Found, Host

HOST: Final = "this host"
DESCRIPTORS_PER_REQUEST: Final = 2
"""One to the client and one to an engine."""
OTHER_DESCRIPTORS: Final = 64
LEAST_LOCKED_BYTES: Final = 1 << 30
LEAST_SHM_BYTES: Final = 64 << 20


async def _open_files(setup: SetUp) -> Found:
    limit = setup.host.limit(resource.RLIMIT_NOFILE)
    requests = setup.settings.max_concurrent_requests
    need = DESCRIPTORS_PER_REQUEST * requests + OTHER_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < need:
        yield warning(
            HOST,
            f"a process may have {limit} descriptors, and {requests} requests at a time "
            f"(--max-concurrent-requests) need {need}: further connections are refused",
            f"raise it with `ulimit -n {need}` (LimitNOFILE={need} in a systemd unit), or lower "
            "--max-concurrent-requests",
        )


async def _locked_memory(setup: SetUp) -> Found:
    """Only where there is RDMA: nothing else locks memory."""
    limit = setup.host.limit(resource.RLIMIT_MEMLOCK)
    enough = limit == resource.RLIM_INFINITY or limit >= LEAST_LOCKED_BYTES
    if has_rdma(setup.host) and not enough:
        yield warning(
            HOST,
            f"a process may lock {ByteSize(limit).human_readable()} of memory, and RDMA locks all "
            "that it reads and writes: engines and store nodes under this limit use TCP",
            "raise it with `ulimit -l unlimited` (LimitMEMLOCK=infinity in a systemd unit, "
            "`ulimits: memlock: -1` in compose)",
        )


async def _shared_memory(setup: SetUp) -> Found:
    """Only where engines run here: vLLM's workers talk through it."""
    if not any(is_loopback(each.engine.host) for each in await setup.all_engines()):
        return
    free = setup.host.shm_free_bytes()
    if free is not None and free < LEAST_SHM_BYTES:
        yield warning(
            HOST,
            f"/dev/shm has {ByteSize(free).human_readable()} left, and engines of several GPUs on "
            "this host talk through it: they hang or die when it is full",
            "delete what dead processes left there, or give containers --ipc=host or --shm-size",
        )


def has_rdma(host: Host) -> bool:
    """Whether this host has an RDMA device."""
    folder = host.sysfs_rdma
    return folder.is_dir() and any(folder.iterdir())


CHECKS: Final = (
    Check("open-files", "this shell's `ulimit -n` is enough for the router", _open_files),
    Check("locked-memory", "where there is RDMA, `ulimit -l` lets it lock memory", _locked_memory),
    Check("shared-memory", "where engines run here, /dev/shm has room", _shared_memory),
)
