"""The lower bound of sockets: the C pair of raw_pair.c, one frame for all blocks of a call.

Its server is `python -m benchmarks.store.contenders.raw LIBRARY SOCKET BYTES`. That prints
"ready PORT", and ends when its standard input ends.
"""

import contextlib
import ctypes
import mmap
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.store.contender import Call, Contender, Seat, connect

HELLO_BYTES = 32


def library(path: Path) -> ctypes.CDLL:
    """The compiled raw_pair.c with its signatures."""
    lib = ctypes.CDLL(str(path))
    size, number, fd, memory = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p
    lib.raw_serve.argtypes = [fd, memory, size, number, ctypes.c_int]
    for function in (lib.raw_put, lib.raw_get):
        function.argtypes = [fd, memory, size, number, number, ctypes.c_int]
    return lib


def tune(link: socket.socket) -> None:
    """The TCP options of both ends, as the store sets them on one host: no delay, no pacing."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for kind in (b"cubic", b"reno"):  # the former may need a privilege
        with contextlib.suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, kind)
            return


class Raw(Contender):
    """Options: `transport` 'unix' or 'tcp', `digest` 'crc32c' or 'none'."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._lib = library(Path(seat.server["library"]))
        self._crc = int(seat.options["digest"] == "crc32c")
        if seat.options["transport"] == "tcp":
            self._link = connect(seat.server)
            tune(self._link)
        else:
            self._link = socket.socket(socket.AF_UNIX)
            self._link.connect(seat.server["path"])
        slots = (seat.client * seat.blocks, seat.blocks, seat.block_bytes, self._crc)
        self._link.sendall(b"".join(number.to_bytes(8, "little") for number in slots))

    def putting(self, first: int, blocks: int) -> Call:
        """One round trip."""
        return self._moving(self._lib.raw_put, self.seat.source.address, first, blocks)

    def getting(self, first: int, blocks: int) -> Call:
        """One round trip."""
        return self._moving(self._lib.raw_get, self.seat.landing.address, first, blocks)

    def answer(self, op: str, blocks: int) -> object:
        """Its status."""
        return 0

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _moving(self, function: Callable[..., int], base: int, first: int, blocks: int) -> Call:
        size = self.seat.block_bytes
        at = base + first * size
        return partial(function, self._link.fileno(), at, size, first, blocks, self._crc)


def main() -> int:
    """Serve TCP and the Unix socket, a thread for each connection."""
    lib, path, pool_bytes = library(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    pool = mmap.mmap(-1, pool_bytes)
    for at in range(0, pool_bytes, mmap.PAGESIZE):
        pool[at] = 1
    base = ctypes.addressof(ctypes.c_char.from_buffer(pool))

    def serve(link: socket.socket) -> None:
        """Serve one connection, which begins with its slots, their size, and the digest mode."""
        hello = link.recv(HELLO_BYTES, socket.MSG_WAITALL)
        first, slots, slot_bytes, with_crc = (
            int.from_bytes(hello[at : at + 8], "little") for at in range(0, HELLO_BYTES, 8)
        )
        if len(hello) == HELLO_BYTES and (first + slots) * slot_bytes <= pool_bytes:
            lib.raw_serve(link.fileno(), base + first * slot_bytes, slot_bytes, slots, with_crc)
        link.close()

    def accept(door: socket.socket) -> None:
        while True:
            link, _ = door.accept()
            if link.family == socket.AF_INET:
                tune(link)
            threading.Thread(target=serve, args=(link,), daemon=True).start()

    tcp = socket.create_server(("127.0.0.1", 0))
    near = socket.socket(socket.AF_UNIX)
    near.bind(path)
    near.listen()
    for door in (tcp, near):
        threading.Thread(target=accept, args=(door,), daemon=True).start()
    print("ready", tcp.getsockname()[1], flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
