"""A stand-in for an RDMA device, where there is none: it really moves bytes, between processes too.

Each device has a file in a common folder, where its process writes down its registered memory and
its queue pairs; a peer looks there, as a device would, and then copies with process_vm_writev. It
fails as the verbs do: wrong keys and addresses at the peer, a peer that is silent or dead, work
after an error.
"""

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import secrets
import select
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvrouter_store._core import StoreServer
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.node.rdma_host import RdmaHost
from kvrouter_store.rdma.base import (
    Copy,
    Device,
    LinkType,
    MemoryRegistration,
    QueuePair,
    RdmaEndpoint,
    RdmaUnavailable,
    TransferFailed,
)
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.initiator import Opens
from kvrouter_store.rdma.options import RdmaOptions

__all__ = ["StandIn", "StandInDevice", "attachable", "opens_of"]

ANY = RdmaOptions()

REGION = struct.Struct("<IIQQ")  # key, whether it is open to the peer, address, length
PAIR = struct.Struct("<III16s")  # number, state, number and GID of the peer
ROWS = 512
PAIRS_AT = REGION.size * ROWS
FILE_BYTES = PAIRS_AT + PAIR.size * ROWS
GID = struct.Struct("<2sxxIIxxxx")
FREE, RESET, READY, ERROR = range(4)
CHUNK_BYTES = 64 << 10
SILENCE_S = 0.3
LIST_LENGTH = 64
CUT_EVENTS = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
PR_SET_PTRACER, ANY_PROCESS = 0x59616D61, -1
LIBC = ctypes.CDLL(None, use_errno=True)


class Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class StandIn:
    """What devices have in common: the folder in which they find each other.

    most_pairs: that a device has. refuses: whether memory of so many bytes may not be registered.
    before_copy: called before each piece is copied, with its number; for a test to step in.
    """

    def __init__(
        self,
        folder: Path,
        most_pairs: int = ROWS,
        refuses: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.folder = folder
        self.most_pairs = most_pairs
        self.refuses = refuses
        self.before_copy: Callable[[int], None] = lambda _: None
        self.opened: list[StandInDevice] = []
        self._number = itertools.count(secrets.randbelow(1 << 30))  # unlike in other folders

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close every device."""
        for device in self.opened:
            device.close()

    def open(self, options: RdmaOptions, rail: int = 0) -> Device:
        """Opens a device, as kvrouter_store.rdma.device.open_device does. Any name is one."""
        choice = options.device_of(rail)
        # Where only a debugger may touch another process, this one lets anybody.
        LIBC.prctl(PR_SET_PTRACER, ANY_PROCESS, 0, 0, 0)
        device = StandInDevice(self, choice.name if choice else "standin0", next(self._number))
        self.opened.append(device)
        return device


def opens_of(where: str) -> Opens:
    """What opens devices: stand-in:FOLDER has stand-ins there, anything else is the machine's."""
    kind, _, folder = where.partition(":")
    return StandIn(Path(folder)).open if kind == "stand-in" else open_device


@contextlib.contextmanager
def attachable(
    node: StoreServer, opens: Opens, options: RdmaOptions = ANY, most: int = 64
) -> Iterator[RdmaHost]:
    """While this holds, connections of a started node may attach."""
    devices = [opens(options, rail) for rail in range(max(1, len(options.devices())))]
    host = RdmaHost(node, devices, most)
    try:
        host.start()
        yield host
    finally:
        host.close()


class Table:
    """The file of one device, as its own process or a peer sees it."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._file = path.open("x+b" if create else "r+b")
        if create:
            self._file.truncate(FILE_BYTES)
        self.bytes = mmap.mmap(self._file.fileno(), FILE_BYTES)

    @contextlib.contextmanager
    def locked(self, pair: int) -> Iterator[None]:
        """While nobody else copies through this queue pair, or ends it. Dies with the process."""
        self._lock(fcntl.F_WRLCK, pair)
        try:
            yield
        finally:
            self._lock(fcntl.F_UNLCK, pair)

    def region(self, key: int) -> tuple[int, int, int, int]:
        """Key, open, address and length; zeros for what is not registered."""
        row = key % ROWS
        found = REGION.unpack_from(self.bytes, row * REGION.size)
        return (found[0], found[1], found[2], found[3]) if found[0] == key else (0, 0, 0, 0)

    def set_region(self, row: int, key: int, is_open: bool, address: int, length: int) -> None:
        REGION.pack_into(self.bytes, row * REGION.size, key, is_open, address, length)

    def pair(self, row: int) -> tuple[int, int, int, bytes]:
        found = PAIR.unpack_from(self.bytes, PAIRS_AT + row * PAIR.size)
        return found[0], found[1], found[2], found[3]

    def set_pair(self, row: int, number: int, state: int, peer: int, gid: bytes) -> None:
        PAIR.pack_into(self.bytes, PAIRS_AT + row * PAIR.size, number, state, peer, gid)

    def close(self) -> None:
        self.bytes.close()
        self._file.close()

    def _lock(self, kind: int, pair: int) -> None:
        lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, pair, 1, 0)
        fcntl.fcntl(self._file.fileno(), fcntl.F_OFD_SETLKW, lock)


class StandInRegistration:
    """Memory written down in the device's file."""

    def __init__(self, device: "StandInDevice", address: int, length: int, remote: bool) -> None:
        self.address = address
        self.length = length
        row = device.free_regions.pop()
        # Another key each time, of which the row is a part.
        self.lkey = self.rkey = (secrets.randbelow(1 << 20) + 1) * ROWS + row
        self._device: StandInDevice | None = device
        device.table.set_region(row, self.rkey, remote, address, length)
        device.registrations.add(self)

    def close(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.table.set_region(self.rkey % ROWS, 0, False, 0, 0)
            device.free_regions.append(self.rkey % ROWS)
            device.registrations.discard(self)


class StandInPair:
    """One end of a connection: see kvrouter_store.rdma.base.QueuePair."""

    def __init__(self, device: "StandInDevice", row: int) -> None:
        self.work_requests = self.signalled_completions = self.posted_bytes = 0
        self.row = row
        self._device = device
        self._table: Table = Table(device.path)  # a description of its own: so are its locks
        self._peer: Table | None = None
        self._peer_pid = 0
        self._fenced = self._closed = False
        number = (secrets.randbelow(1 << 14) + 1) * ROWS + row
        psn = secrets.randbits(24)
        self.endpoint = RdmaEndpoint(number, psn, device.gid, 0, 5, LinkType.ETHERNET)
        self._table.set_pair(row, number, RESET, 0, bytes(16))

    def connect(self, peer: RdmaEndpoint) -> None:
        path, self._peer_pid = self._device.path_of(peer.gid)
        try:
            self._peer = Table(path)
        except OSError as error:
            raise TransferFailed("CONNECT", f"nobody is reached there: {error}") from error
        self._far = peer
        number = self.endpoint.qp_number
        self._table.set_pair(self.row, number, READY, peer.qp_number, peer.gid)

    def write(self, copies: Sequence[Copy], deadline: Deadline, cut: int) -> None:
        self._transfer(LIBC.process_vm_writev, copies, deadline, cut)

    def read(self, copies: Sequence[Copy], deadline: Deadline, cut: int) -> None:
        self._transfer(LIBC.process_vm_readv, copies, deadline, cut)

    def fence(self) -> None:
        if self._fenced:
            return
        self._fenced = True
        number = self.endpoint.qp_number
        self._table.set_pair(self.row, number, ERROR, 0, bytes(16))
        with self._table.locked(self.row):  # what was being copied has been
            pass

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.fence()
        self._table.set_pair(self.row, 0, FREE, 0, bytes(16))
        self._table.close()
        if self._peer is not None:
            self._peer.close()
        self._device.pairs.discard(self)
        self._device.free_pairs.append(self.row)

    def _transfer(
        self,
        system_call: Callable[..., int],
        copies: Sequence[Copy],
        deadline: Deadline,
        cut: int,
    ) -> None:
        if self._fenced or self._peer is None:
            raise TransferFailed("WR_FLUSH_ERR", "the queue pair has failed before")
        self.work_requests += len(copies)
        self.signalled_completions += -(-len(copies) // LIST_LENGTH)
        self.posted_bytes += sum(copy.length for copy in copies)
        try:
            for copy in copies:
                self._copy(self._peer, system_call, copy, deadline, cut)
        except BaseException:
            self.fence()
            raise

    def _copy(
        self,
        peer: Table,
        system_call: Callable[..., int],
        copy: Copy,
        deadline: Deadline,
        cut: int,
    ) -> None:
        for done in range(0, copy.length, CHUNK_BYTES):
            self._device.stepped()
            deadline.left_s()
            _look_at(cut, 0)
            here, there = copy.local_address + done, copy.remote_address + done
            size = min(CHUNK_BYTES, copy.length - done)
            if not _within(self._table.region(copy.lkey), here, size, remote=False):
                raise _failed("LOC_PROT_ERR")
            row = self._far.qp_number % ROWS
            with peer.locked(row):
                answers = peer.pair(row) == (
                    self._far.qp_number,
                    READY,
                    self.endpoint.qp_number,
                    self._device.gid,
                )
                if answers and not _within(peer.region(copy.rkey), there, size, remote=True):
                    peer.set_pair(row, self._far.qp_number, ERROR, 0, bytes(16))
                    raise _failed("REM_ACCESS_ERR")
                moved = answers and self._move(system_call, here, there, size)
            if not moved:
                _be_ignored(deadline, cut)

    def _move(self, system_call: Callable[..., int], here: int, there: int, size: int) -> bool:
        """Copy it; False if the peer's process is gone."""
        for done in range(0, size, 1 << 30):
            near, far = Vector(here + done, size), Vector(there + done, size)
            count = system_call(self._peer_pid, ctypes.byref(near), 1, ctypes.byref(far), 1, 0)
            if count != size:
                error = ctypes.get_errno()
                if count < 0 and error != 3:  # ESRCH
                    raise OSError(error, f"process_vm: {os.strerror(error)}")
                return False
        return True


class StandInDevice:
    """See kvrouter_store.rdma.base.Device."""

    def __init__(self, owner: StandIn, name: str, number: int) -> None:
        self.name = name
        self.gid = GID.pack(b"\xfe\x80", os.getpid(), number)
        self.path = owner.folder / self.gid.hex()
        self.table = Table(self.path, create=True)
        self.registrations: set[StandInRegistration] = set()
        self.pairs: set[StandInPair] = set()
        self.free_regions = list(range(ROWS))
        self.free_pairs = list(range(min(ROWS, owner.most_pairs)))
        self._owner = owner
        self._steps = itertools.count(1)
        self._closed = False

    def register(self, address: int, length: int, remote: bool) -> MemoryRegistration:
        if self._owner.refuses(length):
            raise RdmaUnavailable(f"{self.name} does not register {length} bytes of memory")
        return StandInRegistration(self, address, length, remote)

    def queue_pair(self) -> QueuePair:
        if not self.free_pairs:
            raise RdmaUnavailable(f"{self.name} gives no more queue pairs")
        pair = StandInPair(self, self.free_pairs.pop())
        self.pairs.add(pair)
        return pair

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for pair in tuple(self.pairs):
            pair.close()
        for registration in tuple(self.registrations):
            registration.close()
        self.table.close()
        self.path.unlink()

    def path_of(self, gid: bytes) -> tuple[Path, int]:
        """The file of a device, and its process."""
        return self._owner.folder / gid.hex(), int(GID.unpack(gid)[1])

    def stepped(self) -> None:
        """A piece is about to be copied."""
        self._owner.before_copy(next(self._steps))


def _within(region: tuple[int, int, int, int], at: int, size: int, *, remote: bool) -> bool:
    key, is_open, address, length = region
    return bool(key) and bool(is_open or not remote) and address <= at <= address + length - size


def _failed(status: str) -> TransferFailed:
    return TransferFailed(status, f"a copy ended with {status}")


def _look_at(cut: int, wait_s: float) -> None:
    waits = select.poll()
    waits.register(cut, CUT_EVENTS)
    if waits.poll(wait_s * 1000):
        raise TransferFailed(TransferFailed.CUT, "the control channel was cut")


def _be_ignored(deadline: Deadline, cut: int) -> None:
    """Retry in vain, until there have been enough retries."""
    end = time.monotonic() + SILENCE_S
    while (left_s := end - time.monotonic()) > 0:
        _look_at(cut, min(left_s, deadline.left_s()))
    deadline.left_s()
    raise _failed("RETRY_EXC_ERR")
