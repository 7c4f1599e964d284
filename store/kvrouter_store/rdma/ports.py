"""The RDMA ports of this machine, as sysfs shows them: which one to use, and by which GID."""

import socket
from dataclasses import dataclass
from pathlib import Path

from kvrouter_store.rdma.base import LinkType, RdmaUnavailable
from kvrouter_store.rdma.options import LINK_TYPES, NO_HINT, DeviceChoice, RdmaOptions

SYSFS = Path("/sys/class/infiniband")
LINK_LAYERS = {"InfiniBand": LinkType.INFINIBAND, "Ethernet": LinkType.ETHERNET}
NO_GID = bytes(16)
IPV4_MAPPED = bytes(10) + b"\xff\xff"
LINK_LOCAL = b"\xfe\x80"
ROCE_V2 = "RoCE v2"


@dataclass(frozen=True, slots=True)
class Port:
    """An active port of a device, and the GID it is reached by. `lid` is 0 over Ethernet.

    `routed`: the peer is addressed by its GID; a LID is of one subnet.
    """

    device: str
    number: int
    link_type: LinkType
    gid_index: int
    gid: bytes
    lid: int
    routed: bool

    def __str__(self) -> str:
        link = "Ethernet" if self.link_type == LinkType.ETHERNET else "InfiniBand"
        where = socket.inet_ntop(socket.AF_INET6, self.gid).removeprefix("::ffff:")
        return f"{self.device} port {self.number} ({link}, GID {self.gid_index}: {where})"


def choose_port(options: RdmaOptions, rail: int = 0, sysfs: Path = SYSFS) -> Port:
    """The port that the options mean for this rail, see `RdmaOptions.rail_of`.

    Raises RdmaUnavailable where there is none, or it is not up, or not of the link type asked for.
    """
    present = sorted(entry.name for entry in sysfs.iterdir()) if sysfs.is_dir() else []
    if not present:
        raise RdmaUnavailable(
            f"this machine has no RDMA device ({sysfs} is missing or empty): load its driver, or "
            "use another transport"
        )
    asked = options.device_of(rail)
    if asked is not None:
        if asked.name not in present:
            raise RdmaUnavailable(
                f"there is no RDMA device {asked.name}: --dev-name takes {', '.join(present)}"
            )
        return _port(sysfs, asked, options)
    return _first_usable(sysfs, present, options)


def _first_usable(sysfs: Path, present: list[str], options: RdmaOptions) -> Port:
    problems: list[str] = []
    for name in present:
        try:
            return _port(sysfs, DeviceChoice(name, options.hint_gid_index), options)
        except RdmaUnavailable as problem:
            problems.append(str(problem))
    raise RdmaUnavailable("; ".join(problems))


def _port(sysfs: Path, choice: DeviceChoice, options: RdmaOptions) -> Port:
    folder = sysfs / choice.name / "ports" / str(options.ib_port)
    where = f"port {options.ib_port} of {choice.name}"
    link = LINK_LAYERS.get(_text(folder / "link_layer"))
    if link is None:
        raise RdmaUnavailable(f"there is no {where}: see --ib-port")
    state = _text(folder / "state")
    if not state.endswith("ACTIVE"):
        raise RdmaUnavailable(f"{where} is {state or 'not up'}: bring its link up")
    if LINK_TYPES.get(options.link_type, link) != link:
        raise RdmaUnavailable(f"{where} is of link type {_flag(link)}, not {options.link_type}")
    index, gid = _gid(folder, where, link, choice.gid_index)
    lid = int(_text(folder / "lid") or "0", 16)
    if link == LinkType.INFINIBAND and not lid:
        raise RdmaUnavailable(f"{where} has no LID: its fabric needs a subnet manager")
    routed = link == LinkType.ETHERNET or choice.gid_index != NO_HINT
    return Port(choice.name, options.ib_port, link, index, gid, lid, routed)


def _gid(folder: Path, where: str, link: LinkType, hint: int) -> tuple[int, bytes]:
    if hint != NO_HINT or link == LinkType.INFINIBAND:
        index = max(hint, 0)
        gid = _read_gid(folder, index)
        if gid == NO_GID:
            known = ", ".join(map(str, _gids(folder))) or "none"
            raise RdmaUnavailable(f"{where} has no GID of index {index}; it has {known}")
        return index, gid
    routable = {
        index: gid
        for index, gid in _gids(folder).items()
        if _text(folder / "gid_attrs" / "types" / str(index)) == ROCE_V2
    }
    if not routable:
        raise RdmaUnavailable(
            f"{where} has no RoCE v2 GID: give its network interface an IP address, or name a GID "
            "with --hint-gid-index"
        )
    best = min(routable, key=lambda index: (_preference(routable[index]), index))
    return best, routable[best]


def _gids(folder: Path) -> dict[int, bytes]:
    """The GIDs that are set, by their index."""
    listed = (folder / "gids").iterdir() if (folder / "gids").is_dir() else iter(())
    found = {
        index: _read_gid(folder, index) for index in sorted(int(entry.name) for entry in listed)
    }
    return {index: gid for index, gid in found.items() if gid != NO_GID}


def _read_gid(folder: Path, index: int) -> bytes:
    """All zeros where there is none."""
    text = _text(folder / "gids" / str(index))
    return bytes.fromhex(text.replace(":", "")) if text else NO_GID


def _preference(gid: bytes) -> int:
    """IPv4 before IPv6, and link-local addresses last: routers drop them."""
    if gid.startswith(IPV4_MAPPED):
        return 0
    return 2 if gid.startswith(LINK_LOCAL) else 1


def _flag(link: LinkType) -> str:
    return "Ethernet" if link == LinkType.ETHERNET else "IB"


def _text(path: Path) -> str:
    """Empty where nothing can be read: the kernel answers EINVAL for the type of no GID."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
