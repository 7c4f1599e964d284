"""The seam between the RDMA transport and the verbs, and what the two sides exchange.

Nothing here does I/O or imports pyverbs.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import KVStoreError, StoreUnavailable

VERSION = 1
MAX_24_BIT = (1 << 24) - 1
MAX_ADDRESS = 1 << 64

Made = TypeVar("Made", "RdmaEndpoint", "Region")


class RdmaUnavailable(KVStoreError):
    """There is no RDMA to use here; the message is one sentence, with what to do about it."""


class TransferFailed(StoreUnavailable):
    """A one-sided transfer failed, and its queue pair is of no more use.

    Nothing is known of the memory that it wrote. `status` is the work completion's, by its name
    in the verbs (REM_ACCESS_ERR, RETRY_EXC_ERR, WR_FLUSH_ERR), or CUT where the control channel
    hung up first.
    """

    CUT: ClassVar[str] = "CUT"

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class LinkType(IntEnum):
    """The link layer of a port: it decides how the peer is addressed."""

    INFINIBAND = 1
    ETHERNET = 2


@dataclass(frozen=True, slots=True)
class RdmaEndpoint:
    """What each side of a queue pair sends the other, so that they can be connected.

    `mtu_code` is the largest path MTU as the verbs count it (1: 256 bytes ... 5: 4096), `reads` how
    many reads of the peer this side answers at a time. Raises ValueError for impossible values.
    """

    qp_number: int
    psn: int
    gid: bytes
    lid: int
    mtu_code: int
    link_type: LinkType
    reads: int = 16

    SIZE: ClassVar[int] = 32
    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<BBBBIIHxx16s")

    def __post_init__(self) -> None:
        _in_range("queue pair number", self.qp_number, 0, MAX_24_BIT)
        _in_range("packet sequence number", self.psn, 0, MAX_24_BIT)
        _in_range("LID", self.lid, 0, 0xFFFF)
        _in_range("path MTU code", self.mtu_code, 1, 5)
        _in_range("number of reads", self.reads, 1, 255)
        if len(self.gid) != 16:
            raise ValueError(f"an RDMA endpoint has a GID of 16 bytes, not of {len(self.gid)}")
        if self.link_type not in tuple(LinkType):
            raise ValueError(f"an RDMA endpoint has no link type {self.link_type}")

    def to_bytes(self) -> bytes:
        """SIZE bytes, little-endian, the version first."""
        return self._LAYOUT.pack(
            VERSION,
            self.link_type,
            self.mtu_code,
            self.reads,
            self.qp_number,
            self.psn,
            self.lid,
            self.gid,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "RdmaEndpoint":
        """What `to_bytes` made. Raises ValueError, with a sentence, for anything else."""
        _, link, mtu, reads, number, psn, lid, gid = _unpack(cls._LAYOUT, "endpoint", data)
        if link not in tuple(LinkType):
            raise ValueError(f"an RDMA endpoint has no link type {link}")
        made = cls(number, psn, gid, lid, mtu, LinkType(link), reads)
        return _canonical("endpoint", made, data)


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of the peer that may be read and written one-sidedly under `rkey`."""

    address: int
    length: int
    rkey: int

    SIZE: ClassVar[int] = 24
    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<BxxxIQQ")

    def __post_init__(self) -> None:
        _in_range("address", self.address, 0, MAX_ADDRESS - 1)
        _in_range("length", self.length, 1, MAX_ADDRESS - max(self.address, 1))
        _in_range("rkey", self.rkey, 0, 0xFFFFFFFF)

    def to_bytes(self) -> bytes:
        """SIZE bytes, little-endian, the version first."""
        return self._LAYOUT.pack(VERSION, self.rkey, self.address, self.length)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Region":
        """What `to_bytes` made. Raises ValueError, with a sentence, for anything else."""
        _, rkey, address, length = _unpack(cls._LAYOUT, "region", data)
        made = cls(address, length, rkey)
        return _canonical("region", made, data)


class Copy(NamedTuple):
    """One run of bytes between local and remote memory; `length` in bytes, not 0.

    `write` copies to the remote address, `read` from it.
    """

    local_address: int
    lkey: int
    remote_address: int
    rkey: int
    length: int


class MemoryRegistration(Protocol):
    """Memory that the device may use: `length` bytes at `address`, as this process sees it.

    Keeps the pages in place, not the memory alive: its owner frees it after `close`, never before.
    `lkey` is the key of this side's copies; `rkey` that of the peer's copies, of use only where the
    memory was registered as `remote`.
    """

    address: int
    length: int
    lkey: int
    rkey: int

    def close(self) -> None:
        """Give the memory back; the device touches it no more. Idempotent."""


class QueuePair(Protocol):
    """One end of a reliable connection. One thread uses it at a time.

    Whatever `write` or `read` raises, only `fence` and `close` may follow. `endpoint` is what the
    peer needs to know, from the beginning. `work_requests`: copies posted so far, with
    `posted_bytes` of payload; `signalled_completions`: those that asked for a completion, one for
    each list posted.
    """

    endpoint: RdmaEndpoint
    work_requests: int
    signalled_completions: int
    posted_bytes: int

    def connect(self, peer: RdmaEndpoint) -> None:
        """Make it ready to send and to be written.

        Over Ethernet the kernel looks for the peer, up to a second if no host has its GID, and the
        GIL is held. Raises TransferFailed where it cannot be reached from this port.
        """

    def write(self, copies: Sequence[Copy], deadline: Deadline, cut: int) -> None:
        """Copy to the peer's memory; returns when the peer's side has acknowledged all of it.

        `cut` is a descriptor of the control channel to the same peer: its hang-up is a failure too,
        since a silent peer is given up only after several retries. The copies take effect in any
        order, and not at all, or in part, where this raises TransferFailed or DeadlineExceeded; it
        is then fenced before it raises, so that the local memory is not read any more.
        """

    def read(self, copies: Sequence[Copy], deadline: Deadline, cut: int) -> None:
        """Copy from the peer's memory; returns when all of it is here.

        Otherwise as `write`: where it raises, the local memory is not written any more.
        """

    def fence(self) -> None:
        """End it: from here on nothing reads or writes this side's memory through it.

        What this side had posted is flushed and reaped; what is on its way to the peer is the
        peer's to fence. Never raises. Idempotent.
        """

    def close(self) -> None:
        """Fence it and free it. Idempotent."""


class Device(Protocol):
    """An open RDMA device at one port and GID; `name` as the system calls it (mlx5_0, rxe0)."""

    name: str

    def register(self, address: int, length: int, remote: bool) -> MemoryRegistration:
        """Let the device use memory that stays the caller's; the peer too, where it is `remote`.

        Pins every page of it (0.5 s for 256 MiB were seen) and holds the GIL meanwhile: not for the
        request path, and a thread does not help. Raises RdmaUnavailable where it may not be pinned.
        """

    def queue_pair(self) -> QueuePair:
        """A new queue pair, not yet connected. Raises RdmaUnavailable where the device has none."""

    def close(self) -> None:
        """Close what was made of it, queue pairs first, then itself. Idempotent."""


def write_card(endpoint: RdmaEndpoint, pool: Region) -> bytes:
    """What a node answers to ATTACH: its end of the connection, and where its pool is."""
    return endpoint.to_bytes() + pool.to_bytes()


def read_card(card: bytes) -> tuple[RdmaEndpoint, Region]:
    """What `write_card` made. Raises ValueError for anything else."""
    endpoint = RdmaEndpoint.from_bytes(card[: RdmaEndpoint.SIZE])
    return endpoint, Region.from_bytes(card[RdmaEndpoint.SIZE :])


def _in_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"an RDMA {what} is from {low} to {high}, not {value}")


def _unpack(layout: struct.Struct, what: str, data: bytes) -> tuple[Any, ...]:
    if len(data) != layout.size:
        raise ValueError(f"an RDMA {what} has {layout.size} bytes, not {len(data)}")
    if data[0] != VERSION:
        raise ValueError(f"an RDMA {what} of version {data[0]} came; this side speaks {VERSION}")
    return layout.unpack(data)


def _canonical(what: str, made: Made, data: bytes) -> Made:
    if made.to_bytes() != bytes(data):
        raise ValueError(f"the reserved bytes of an RDMA {what} are not zero")
    return made
