"""The near side of the verbs tests."""

import socket

from tests.rdma.rig import MIB, Control, Memory

from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.rdma.base import Copy, Device, RdmaEndpoint, Region

__all__ = ["LARGE", "PATIENCE_S", "SIZE", "NearSide"]

SIZE = 2 * MIB
LARGE = 16 * MIB
# An emulated machine on a loaded host moves 5 MB/s.
PATIENCE_S = 60.0


class NearSide:
    """A queue pair connected to the far side, registered memory here, and the region there."""

    def __init__(
        self, device: Device, control: Control, *, size: int = SIZE, remote: bool = True
    ) -> None:
        self.control = control
        self.device = device
        self.memory = Memory(size, device)
        self.queue_pair = device.queue_pair()
        endpoint = self.queue_pair.endpoint.to_bytes().hex()
        met = control.ask("hello", size=size, endpoint=endpoint, remote=remote)
        self.region = Region.from_bytes(bytes.fromhex(met["region"]))
        self.queue_pair.connect(RdmaEndpoint.from_bytes(bytes.fromhex(met["endpoint"])))
        self._never_cut = socket.socketpair()

    @property
    def cut(self) -> int:
        """The control channel's descriptor."""
        return self.control.link.fileno()

    @property
    def never_cut(self) -> int:
        """A descriptor that stays open whatever happens to the far side."""
        return self._never_cut[0].fileno()

    def blocks(self, number: int, length: int) -> list[Copy]:
        """Copies of consecutive blocks, in the far side in the opposite order."""
        return [
            self.memory.copy(
                self.region, length, here=place * length, there=(number - 1 - place) * length
            )
            for place in range(number)
        ]

    def write(self, *copies: Copy, deadline_s: float = PATIENCE_S, cut: int | None = None) -> None:
        """Write them, noticing a cut of the control channel unless told to look elsewhere."""
        self.queue_pair.write(copies, Deadline(deadline_s), self.cut if cut is None else cut)

    def read(self, *copies: Copy, deadline_s: float = PATIENCE_S, cut: int | None = None) -> None:
        """As `write`."""
        self.queue_pair.read(copies, Deadline(deadline_s), self.cut if cut is None else cut)

    def far_digest(self, offset: int = 0, length: int | None = None) -> int:
        """CRC of a part of the far side's memory; of all of it where no length is given."""
        span = self.memory.size if length is None else length
        crc: int = self.control.ask("digest", offset=offset, length=span)["crc"]
        return crc

    def close(self) -> None:
        """Give everything back."""
        self.queue_pair.close()
        self.memory.close()
        for end in self._never_cut:
            end.close()
