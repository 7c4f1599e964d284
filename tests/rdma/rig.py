"""What both sides of the verbs tests are made of: memory, and lines of JSON between them."""

import ctypes
import json
import mmap
import socket
import zlib
from typing import Any

from kvrouter_store.rdma.base import Copy, Device, MemoryRegistration, Region

__all__ = ["MIB", "Control", "Memory"]

MIB = 1 << 20


class Memory:
    """Anonymous memory, registered with a device unless it is given none."""

    def __init__(self, size: int, device: Device | None = None, *, remote: bool = False) -> None:
        self.size = size
        self.bytes = mmap.mmap(-1, size)
        self._held = ctypes.c_char.from_buffer(self.bytes)
        self.address = ctypes.addressof(self._held)
        self.registration: MemoryRegistration | None = None
        if device is not None:
            self.registration = device.register(self.address, size, remote)

    @property
    def region(self) -> Region:
        """What the peer needs to know of it."""
        assert self.registration is not None
        return Region(self.address, self.size, self.registration.rkey)

    def copy(self, region: Region, length: int, here: int = 0, there: int = 0) -> Copy:
        """Between `here` bytes into this memory and `there` bytes into the peer's."""
        assert self.registration is not None
        lkey = self.registration.lkey
        return Copy(self.address + here, lkey, region.address + there, region.rkey, length)

    def digest(self, offset: int = 0, length: int | None = None) -> int:
        """CRC of a part of it."""
        end = self.size if length is None else offset + length
        return zlib.crc32(memoryview(self.bytes)[offset:end])

    def close(self) -> None:
        """Give it back."""
        if self.registration is not None:
            self.registration.close()
        del self._held
        self.bytes.close()


class Control:
    """A connection that carries lines of JSON."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._lines = link.makefile("rwb")

    def send(self, **message: Any) -> None:
        """One line."""
        self._lines.write(json.dumps(message).encode() + b"\n")
        self._lines.flush()

    def receive(self) -> dict[str, Any]:
        """The next line. Raises ConnectionError where there is none."""
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the far side is gone")
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request; its reply."""
        self.send(op=op, **arguments)
        return self.receive()

    def close(self) -> None:
        """Hang up."""
        self._lines.close()
        self.link.close()
