"""peer.py HOST PORT: the far side of the verbs tests. Each connection is a process of its own,
forked when everything is imported, with its own device, memory and queue pair; it prints its port.
"""

import logging
import os
import resource
import signal
import socket
import sys
from typing import Any

from tests.rdma.rig import Control, Memory

from kvrouter_store.rdma.base import RdmaEndpoint, RdmaUnavailable
from kvrouter_store.rdma.device import load_pyverbs, open_device
from kvrouter_store.rdma.options import RdmaOptions
from kvrouter_store.rdma.ports import choose_port

NOBODY = 65534


class FarSide:
    """What one connection asks for, done; the reply of each request is what its method returns."""

    def __init__(self, control: Control, options: RdmaOptions) -> None:
        self.control = control
        self.options = options

    def hello(self, size: int, endpoint: str, remote: bool = True) -> dict[str, Any]:
        """Open everything and connect."""
        self.device = open_device(self.options)
        self.memory = Memory(size, self.device, remote=remote)
        self.queue_pair = self.device.queue_pair()
        self.queue_pair.connect(RdmaEndpoint.from_bytes(bytes.fromhex(endpoint)))
        return {
            "endpoint": self.queue_pair.endpoint.to_bytes().hex(),
            "region": self.memory.region.to_bytes().hex(),
        }

    def fill(self, data: str) -> dict[str, Any]:
        """Repeat these bytes over the whole memory."""
        pattern = bytes.fromhex(data)
        self.memory.bytes[:] = pattern * (self.memory.size // len(pattern))
        return {}

    def digest(self, offset: int, length: int) -> dict[str, Any]:
        """CRC of a part of the memory."""
        return {"crc": self.memory.digest(offset, length)}

    def holds(self, value: int) -> dict[str, Any]:
        """Whether a byte of this value is anywhere in the memory."""
        return {"found": self.memory.bytes.find(bytes([value])) >= 0}

    def unregister(self) -> dict[str, Any]:
        """Give the registration back; the queue pair stays up."""
        assert self.memory.registration is not None
        self.memory.registration.close()
        return {}

    def fence(self) -> dict[str, Any]:
        """Fence the queue pair, so that nothing of the other side is answered any more."""
        self.queue_pair.fence()
        return {}

    def fence_when(self, offset: int) -> dict[str, Any]:
        """Fence as soon as a write has reached the byte; the CRC of all memory right after."""
        self.control.send(ready=True)
        self._await_byte(offset)
        self.queue_pair.fence()
        return {"crc": self.memory.digest()}

    def die_when(self, offset: int) -> dict[str, Any]:
        """Be killed as soon as a write has reached the byte."""
        self.control.send(ready=True)
        self._await_byte(offset)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def register_as_nobody(self, limit: int, size: int) -> dict[str, Any]:
        """What a user who may lock only `limit` bytes hears when `size` are registered."""
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        os.setuid(NOBODY)
        device = open_device(self.options)
        try:
            Memory(size, device)
        except RdmaUnavailable as problem:
            return {"problem": str(problem)}
        return {"problem": ""}

    def logging_handlers(self) -> dict[str, Any]:
        """How many handlers the root logger has in this process, which set up none."""
        return {"number": len(logging.getLogger().handlers)}

    def _await_byte(self, offset: int) -> None:
        while not self.memory.bytes[offset]:
            os.sched_yield()


def serve(link: socket.socket, options: RdmaOptions) -> None:
    """Answer one connection until it ends."""
    control = Control(link)
    side = FarSide(control, options)
    while True:
        try:
            request = control.receive()
        except (ConnectionError, OSError):
            return
        reply = getattr(side, request.pop("op"))(**request)
        control.send(**reply)


def main() -> None:
    """Accept until killed. The kernel reaps the children and frees what they held."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    host, port = sys.argv[1:]
    load_pyverbs()  # before the fork, for all connections
    port_found = choose_port(RdmaOptions())  # once: a table of a thousand GIDs is searched
    options = RdmaOptions(dev_name=f"{port_found.device}:{port_found.gid_index}")
    listener = socket.create_server((host, int(port)))
    print(listener.getsockname()[1], flush=True)
    while True:
        link, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            serve(link, options)
            os._exit(0)
        link.close()


if __name__ == "__main__":
    main()
