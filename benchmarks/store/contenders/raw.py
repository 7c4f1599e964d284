"""The lower bound of sockets: the C pair of raw_pair.c, one frame for all blocks of a call."""

import contextlib
import ctypes
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.store.contender import Call, Contender, Seat, connect

__all__ = ["Raw", "library", "tune"]


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
