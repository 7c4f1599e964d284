"""Checks of this host's RDMA devices, by what sysfs says of them: ports, GIDs, MTU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvrouter.doctor.base import Check, Finding, SetUp, Severity
from kvrouter.doctor.limits import has_rdma
from kvstore.rdma.base import LinkType, RdmaUnavailable
from kvstore.rdma.options import RdmaOptions
from kvstore.rdma.ports import Port, choose_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvrouter.doctor.base import Host

FULL_MTU_BYTES: Final = 4200
"""What an interface needs so that RoCE packets carry 4096 bytes beside their headers."""
ROCE_MTUS: Final = (4096, 2048, 1024, 512, 256)
ROCE_HEADER_BYTES: Final = 100
LINK_LOCAL: Final = b"\xfe\x80"


def _devices(host: Host) -> list[str]:
    return sorted(entry.name for entry in host.sysfs_rdma.iterdir()) if has_rdma(host) else []


def _usable(host: Host) -> Iterator[Port]:
    """The port of each device that can be used."""
    for name in _devices(host):
        try:
            yield choose_port(RdmaOptions(name), sysfs=host.sysfs_rdma)
        except RdmaUnavailable:
            continue


async def _ports(setup: SetUp) -> list[Finding]:
    found = []
    for name in _devices(setup.host):
        try:
            choose_port(RdmaOptions(name), sysfs=setup.host.sysfs_rdma)
        except RdmaUnavailable as problem:
            if "GID" in str(problem):
                continue
            finding = f"it cannot be used: {problem}"
            remedy = (
                "bring its link up (`ip link set ... up`, cable, subnet manager), or name the "
                "device to use with --dev-name"
            )
            found.append(Finding(Severity.WARNING, f"RDMA device {name}", finding, remedy))
    return found


async def _gids(setup: SetUp) -> list[Finding]:
    found = []
    for name in _devices(setup.host):
        subject = f"RDMA device {name}"
        try:
            port = choose_port(RdmaOptions(name), sysfs=setup.host.sysfs_rdma)
        except RdmaUnavailable as problem:
            if "GID" in str(problem):
                remedy = (
                    "give its network interface an IP address, or name the GID of RoCE v2 with "
                    "--hint-gid-index"
                )
                found.append(Finding(Severity.WARNING, subject, str(problem), remedy))
            continue
        if port.link_type == LinkType.ETHERNET and port.gid.startswith(LINK_LOCAL):
            finding = (
                f"its only RoCE v2 GID ({port}) is link-local: peers behind a router cannot be "
                "reached by it"
            )
            remedy = "give its network interface a routable IP address"
            found.append(Finding(Severity.WARNING, subject, finding, remedy))
    return found


async def _mtu(setup: SetUp) -> list[Finding]:
    """Of RoCE: its packets are as large as the network interface lets them be."""
    found = []
    for port in _usable(setup.host):
        if port.link_type != LinkType.ETHERNET:
            continue
        interface, mtu = _interface(setup.host, port)
        if interface and mtu < FULL_MTU_BYTES:
            payload = next((size for size in ROCE_MTUS if size + ROCE_HEADER_BYTES <= mtu), 256)
            found.append(
                Finding(
                    Severity.WARNING,
                    f"RDMA device {port.device}",
                    f"its interface {interface} has an MTU of {mtu}, so that RDMA packets carry "
                    f"{payload} bytes instead of 4096",
                    f"`ip link set {interface} mtu 9000`, on the switches and on all hosts alike",
                )
            )
    return found


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
    Check("rdma-port", "the port of each RDMA device is up", _ports),
    Check("rdma-gid", "each RoCE port has a GID by which others reach it", _gids),
    Check("rdma-mtu", "interfaces of RoCE ports have a large MTU", _mtu),
)
