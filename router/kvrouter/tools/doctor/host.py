"""Checks of this host: limits of processes, the memory of a store that runs here, RDMA devices.

What is said of RDMA is from sysfs: ports, GIDs, MTU.
"""

from __future__ import annotations

import re
import resource
from typing import TYPE_CHECKING, Final

from pydantic import ByteSize

from kvrouter.tools.doctor.base import Found, Host, Setup, remark, warning
from kvrouter_store.descriptors import RESERVED
from kvrouter_store.node.placement import memory_nodes, plan
from kvrouter_store.node.start_checks import is_loopback
from kvrouter_store.rdma.base import LinkType, RdmaUnavailable
from kvrouter_store.rdma.options import RdmaOptions
from kvrouter_store.rdma.ports import Port, choose_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.tools.doctor.store import StoreFacts

HOST: Final = "this host"
DESCRIPTORS_PER_REQUEST: Final = 2  # one to the client and one to an engine
MIN_LOCKED_BYTES: Final = 1 << 30
MIN_SHM_BYTES: Final = 64 << 20
LARGE_POOL_BYTES: Final = 1 << 30
"""A smaller pool gains nothing that can be measured from huge pages or NUMA."""
FULL_MTU_BYTES: Final = 4200
"""The MTU of an interface whose RoCE packets carry 4096 bytes and their headers."""
ROCE_MTUS: Final = (4096, 2048, 1024, 512, 256)
ROCE_HEADER_BYTES: Final = 100
LINK_LOCAL: Final = b"\xfe\x80"


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
    if not any(is_loopback(each.engine.host) for each in setup.engines):
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


async def huge_pages(setup: Setup) -> Found:
    """A large pool of a store on this host has huge pages."""
    for store in setup.usable_stores:
        if not _is_large_here(store) or not store.stat("page_bytes.small"):
            continue
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


async def numa(setup: Setup) -> Found:
    """A large pool of a store on this host is spread over the NUMA nodes."""
    for store in setup.usable_stores:
        nodes = memory_nodes(setup.host.read)
        if _is_large_here(store) and len(nodes) > 1 and "numa_used_bytes.any" in store.stats:
            yield remark(
                store.url,
                f"this host has {len(nodes)} NUMA nodes, and the pool is bound to none of them",
                "give its container the capability SYS_NICE, or run a node for each under `numactl "
                "--cpunodebind=N --membind=N`",
            )


def _ports(host: Host) -> Iterator[tuple[str, Port | RdmaUnavailable]]:
    """Each device, as findings name it, with the port that would be used, or why none can be."""
    for name in sorted(each.name for each in host.sysfs_rdma.iterdir()) if host.has_rdma else ():
        try:
            yield f"RDMA device {name}", choose_port(RdmaOptions(name), sysfs=host.sysfs_rdma)
        except RdmaUnavailable as problem:
            yield f"RDMA device {name}", problem


async def rdma_port(setup: Setup) -> Found:
    """The port of each RDMA device is up."""
    for device, port in _ports(setup.host):
        if isinstance(port, RdmaUnavailable) and "GID" not in str(port):
            yield warning(
                device,
                f"it cannot be used: {port}",
                "bring its link up (`ip link set ... up`, cable, subnet manager), or name the "
                "device to use with --dev-name",
            )


async def rdma_gid(setup: Setup) -> Found:
    """Each RoCE port has a GID by which others reach it."""
    for device, port in _ports(setup.host):
        if isinstance(port, RdmaUnavailable):
            if "GID" in str(port):
                yield warning(
                    device,
                    str(port),
                    "give its network interface an IP address, or name the GID of RoCE v2 with "
                    "--hint-gid-index",
                )
        elif port.link_type == LinkType.ETHERNET and port.gid.startswith(LINK_LOCAL):
            yield warning(
                device,
                f"its only RoCE v2 GID ({port}) is link-local: peers behind a router cannot reach "
                "it",
                "give its network interface a routable IP address",
            )


async def rdma_mtu(setup: Setup) -> Found:
    """Interfaces of RoCE ports have a large MTU."""
    for device, port in _ports(setup.host):
        if isinstance(port, RdmaUnavailable) or port.link_type != LinkType.ETHERNET:
            continue
        interface, mtu = _interface(setup.host, port)
        if interface and mtu < FULL_MTU_BYTES:
            payload = next((size for size in ROCE_MTUS if size + ROCE_HEADER_BYTES <= mtu), 256)
            yield warning(
                device,
                f"its interface {interface} has an MTU of {mtu}, so that RDMA packets carry "
                f"{payload} bytes instead of 4096",
                f"`ip link set {interface} mtu 9000`, on the switches and on all hosts",
            )


def _interface(host: Host, port: Port) -> tuple[str, int]:
    """Name and MTU of the network interface of a port's GID; "" if unknown."""
    folder = f"/sys/class/infiniband/{port.device}/ports/{port.number}"
    name = host.read(f"{folder}/gid_attrs/ndevs/{port.gid_index}").strip()
    sane = re.fullmatch(r"[\w.@:-]{1,15}", name)
    mtu = host.read(f"/sys/class/net/{name}/mtu").strip() if sane else ""
    return (name, int(mtu)) if mtu.isdecimal() else ("", 0)
