"""Checks of this host's RDMA devices, from sysfs: ports, GIDs, MTU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvrouter.tools.doctor.base import Found, Host, Setup, warning
from kvrouter_store.rdma.base import LinkType, RdmaUnavailable
from kvrouter_store.rdma.options import RdmaOptions
from kvrouter_store.rdma.ports import Port, choose_port

if TYPE_CHECKING:
    from collections.abc import Iterator


FULL_MTU_BYTES: Final = 4200
"""The MTU of an interface whose RoCE packets carry 4096 bytes and their headers."""
ROCE_MTUS: Final = (4096, 2048, 1024, 512, 256)
ROCE_HEADER_BYTES: Final = 100
LINK_LOCAL: Final = b"\xfe\x80"


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
