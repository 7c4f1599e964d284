"""Which RDMA device to use, with the option names of InfiniStore and AIBrix. Does no I/O."""

import re
from dataclasses import dataclass

from kvrouter_store.rdma.base import LinkType

NO_HINT = -1
MAX_GID_INDEX = 255
LINK_TYPES = {"IB": LinkType.INFINIBAND, "Ethernet": LinkType.ETHERNET}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device by its name and the GID to use there, NO_HINT to look one up."""

    name: str
    gid_index: int = NO_HINT


@dataclass(frozen=True, slots=True)
class RdmaOptions:
    """The options for RDMA. Raises ValueError, with a sentence, for impossible ones.

    `dev_name`: one device, or several with or without a GID index each (mlx5_1:6,mlx5_2:7); empty
    for the first that can be used. `link_type`: IB or Ethernet, empty for what the port is.
    `hint_gid_index`: for the devices without one of their own.
    """

    dev_name: str = ""
    ib_port: int = 1
    link_type: str = ""
    hint_gid_index: int = NO_HINT

    def __post_init__(self) -> None:
        if not 1 <= self.ib_port <= 255:
            raise ValueError(f"--ib-port is from 1 to 255, not {self.ib_port}")
        if self.link_type not in ("", *LINK_TYPES):
            raise ValueError(f"--link-type is IB or Ethernet, not {self.link_type!r}")
        _check_index("--hint-gid-index", self.hint_gid_index)
        self.devices()

    def devices(self) -> list[DeviceChoice]:
        """The devices that were named, in their order; none where any will do."""
        if not self.dev_name.strip():
            return []
        return [self._device(entry.strip()) for entry in self.dev_name.split(",")]

    def rail_of(self, gpu: int, gpus: int) -> int:
        """Which device, here and at the node, is for one of so many GPUs.

        As AIBrix says: of 8 GPUs and 2 devices, the first has GPUs 0 to 3 and the second 4 to 7.
        """
        devices = min(len(self.devices()), gpus)
        return gpu * devices // gpus if devices else gpu

    def device_of(self, rail: int) -> DeviceChoice | None:
        """The device of this number, or of that modulo their number. None where any will do."""
        devices = self.devices()
        return devices[rail % len(devices)] if devices else None

    def _device(self, entry: str) -> DeviceChoice:
        name, colon, index = entry.partition(":")
        if not NAME.fullmatch(name):
            raise ValueError(f"--dev-name: {entry!r} is no device; write mlx5_0 or mlx5_0:3")
        if not colon:
            return DeviceChoice(name, self.hint_gid_index)
        if not re.fullmatch(r"[0-9]{1,4}", index):
            raise ValueError(f"--dev-name: {index!r} after {name} is no GID index; write {name}:3")
        _check_index("--dev-name: a GID index", int(index))
        return DeviceChoice(name, int(index))


def _check_index(what: str, index: int) -> None:
    if not NO_HINT <= index <= MAX_GID_INDEX:
        raise ValueError(f"{what} is from 0 to {MAX_GID_INDEX} (or -1 for none), not {index}")
