"""Checks of this host's RDMA devices, by what sysfs says of them: ports, GIDs, MTU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvrouter.tools.doctor.base import Check, SetUp, warning
from kvrouter.tools.doctor.limits import has_rdma
from kvrouter_store.rdma.base import LinkType, RdmaUnavailable
from kvrouter_store.rdma.options import RdmaOptions
from kvrouter_store.rdma.ports import Port, choose_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvrouter.tools.doctor.base import Found, Host

FULL_MTU_BYTES: Final = 4200
"""What an interface needs so that RoCE packets carry 4096 bytes beside their headers."""
ROCE_MTUS: Final = (4096, 2048, 1024, 512, 256)
ROCE_HEADER_BYTES: Final = 100
LINK_LOCAL: Final = b"\xfe\x80"


def _ports(host: Host) -> Iterator[tuple[str, Port | RdmaUnavailable]]:
    """Each device with the port that would be used, or why none can be."""
    for name in sorted(entry.name for entry in host.sysfs_rdma.iterdir()) if has_rdma(host) else ():
        try:
            yield name, choose_port(RdmaOptions(name), sysfs=host.sysfs_rdma)
        except RdmaUnavailable as problem:
            yield name, problem


async def _links(setup: SetUp) -> Found:
    for name, port in _ports(setup.host):
        if isinstance(port, RdmaUnavailable) and "GID" not in str(port):
            yield warning(
                f"RDMA device {name}",
                f"it cannot be used: {port}",
                "bring its link up (`ip link set ... up`, cable, subnet manager), or name the "
                "device to use with --dev-name",
            )


async def _gids(setup: SetUp) -> Found:
    for name, port in _ports(setup.host):
        if isinstance(port, RdmaUnavailable):
            if "GID" in str(port):
                yield warning(
                    f"RDMA device {name}",
                    str(port),
                    "give its network interface an IP address, or name the GID of RoCE v2 with "
                    "--hint-gid-index",
                )
        elif port.link_type == LinkType.ETHERNET and port.gid.startswith(LINK_LOCAL):
            yield warning(
                f"RDMA device {name}",
                f"its only RoCE v2 GID ({port}) is link-local: peers behind a router cannot be "
                "reached by it",
                "give its network interface a routable IP address",
            )


async def _mtu(setup: SetUp) -> Found:
    """Of RoCE: its packets are as large as the network interface lets them be."""
    for name, port in _ports(setup.host):
        if isinstance(port, RdmaUnavailable) or port.link_type != LinkType.ETHERNET:
            continue
        interface, mtu = _interface(setup.host, port)
        if interface and mtu < FULL_MTU_BYTES:
            payload = next((size for size in ROCE_MTUS if size + ROCE_HEADER_BYTES <= mtu), 256)
            yield warning(
                f"RDMA device {name}",
                f"its interface {interface} has an MTU of {mtu}, so that RDMA packets carry "
                f"{payload} bytes instead of 4096",
                f"`ip link set {interface} mtu 9000`, on the switches and on all hosts alike",
            )


def _interface(host: Host, port: Port) -> tuple[str, int]:
    """Name and MTU of the network interface of a port's GID; "" where that cannot be told."""
    folder = host.sysfs_rdma / port.device / "ports" / str(port.number)
    name = _text(folder / "gid_attrs" / "ndevs" / str(port.gid_index))
    mtu = _text(host.root / "sys/class/net" / name / "mtu") if _sane(name) else ""
    return (name, int(mtu)) if mtu.isdecimal() else ("", 0)


def _sane(name: str) -> bool:
    return re.fullmatch(r"[\w.@:-]{1,15}", name) is not None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


CHECKS: Final = (
    Check("rdma-port", "the port of each RDMA device is up", _links),
    Check("rdma-gid", "each RoCE port has a GID by which others reach it", _gids),
    Check("rdma-mtu", "interfaces of RoCE ports have a large MTU", _mtu),
)
