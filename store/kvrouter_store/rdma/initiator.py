"""A client's side of RDMA: its device, the memory registered there, a queue pair per connection.

Only the client reads and writes; the node's processor has no part in it.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrouter_store import _core
from kvrouter_store._core import AttachReply, Segments
from kvrouter_store.connection.channel import Channel
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import StoreClosed, StoreRefused, StoreUnavailable
from kvrouter_store.rdma.base import (
    Copy,
    Device,
    QueuePair,
    Region,
    TransferFailed,
    read_card,
)
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.memory import MemoryKeys, RegisteredMemory
from kvrouter_store.rdma.options import RdmaOptions

LINE_BYTES = 64
Opens = Callable[[RdmaOptions, int], Device]


class NotAttached(StoreUnavailable):
    """A connection gets no RDMA: the node has none for it, or no byte gets through."""


@dataclass(eq=False)
class RemotePool:
    """A node's pool, as one connection reaches it over its queue pair. For the channel's thread.

    After an exception of `write` or `read` its queue pair is of no more use.
    """

    initiator: "Initiator"
    memory: RegisteredMemory
    queue_pair: QueuePair
    region: Region
    cut: int

    def __post_init__(self) -> None:
        self._closed = False

    def write(self, copies: Sequence[Copy], deadline: Deadline) -> None:
        """Copy blocks into the pool. Raises TransferFailed, DeadlineExceeded."""
        self.queue_pair.write(copies, deadline, self.cut)

    def read(self, copies: Sequence[Copy], deadline: Deadline) -> None:
        """Copy out of the pool, by `copies` too. Raises as `write`."""
        self.queue_pair.read(copies, deadline, self.cut)

    def copies(
        self, keys: MemoryKeys, segments: Segments, indices: Sequence[int], offsets: Sequence[int]
    ) -> list[Copy]:
        """The copies between blocks and these offsets. Raises TransferFailed beyond the pool."""
        region, most = self.region, self.region.length - segments.block_bytes
        copies: list[Copy] = []
        for runs, offset in zip(segments.pieces(indices), offsets, strict=True):
            if not 0 <= offset <= most:
                raise TransferFailed("OFFSET", "the store named a slot outside of its pool")
            there = region.address + offset
            for here, size in runs:
                copies.append(Copy(here, keys.of(here), there, region.rkey, size))
                there += size
        return copies

    def close(self) -> None:
        """End the queue pair: nothing touches the callers' memory through it any more."""
        if not self._closed:
            self._closed = True
            self.queue_pair.close()
            self.initiator.released()


class Initiator:
    """The RDMA device of one client, and the memory registered with it. Safe in threads.

    rail: which device, of several, here and at the node: `RdmaOptions.rail_of`.
    opens: opens the device when it is first needed.
    """

    def __init__(
        self,
        options: RdmaOptions = RdmaOptions(),  # noqa: B008 (immutable)
        rail: int = 0,
        opens: Opens = open_device,
    ) -> None:
        self._options = options
        self._rail = rail
        self._opens = opens
        self._lock = threading.Lock()
        self._device: Device | None = None
        self._memory: RegisteredMemory | None = None
        self._line = Segments.over(bytearray(LINE_BYTES), LINE_BYTES, writable=True)
        self._users = 0
        self._closed = False

    def open(self) -> Device:
        """The device. Raises RdmaUnavailable where there is none to use, StoreClosed."""
        with self._lock:
            return self._opened()

    def attach(self, channel: Channel, deadline: Deadline) -> None:
        """Give the channel a queue pair (`channel.remote`), over which a line has been read.

        Raises NotAttached where it gets none, RdmaUnavailable where there is no device here,
        LinkLost, DeadlineExceeded.
        """
        with self._lock:
            device = self._opened()
            memory = self._memory = self._memory or RegisteredMemory(device)
            self._users += 1
        try:
            remote = self._attached(channel, device, memory, deadline)
        except BaseException:
            self.released()
            raise
        channel.remote = remote

    def close(self) -> None:
        """Close the device, when the last queue pair has been."""
        with self._lock:
            self._closed = True
        self._close_unused()

    def released(self) -> None:
        """One user of the device less (RemotePool calls it)."""
        with self._lock:
            self._users -= 1
        self._close_unused()

    def _opened(self) -> Device:
        if self._closed:
            raise StoreClosed("the store client is closed")
        if self._device is None:
            self._device = self._opens(self._options, self._rail)
        return self._device

    def _close_unused(self) -> None:
        with self._lock:
            if not self._closed or self._users:
                return
            device, self._device = self._device, None
            memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        if device is not None:
            device.close()

    def _attached(
        self, channel: Channel, device: Device, memory: RegisteredMemory, deadline: Deadline
    ) -> RemotePool:
        with contextlib.ExitStack() as undo:
            queue_pair = device.queue_pair()
            undo.callback(queue_pair.close)
            card = queue_pair.endpoint.to_bytes()
            try:
                reply = channel.ask(AttachReply, deadline, _core.encode_attach, card, self._rail)
            except StoreRefused as refusal:
                raise NotAttached(str(refusal)) from refusal
            try:
                endpoint, region = read_card(reply.card)
            except ValueError as error:
                channel.lost(error)
            remote = RemotePool(self, memory, queue_pair, region, channel.descriptor)
            try:
                queue_pair.connect(endpoint)
                with memory.held(self._line, [0]) as keys:
                    remote.read(remote.copies(keys, self._line, [0], [0]), deadline)
            except TransferFailed as failure:
                raise NotAttached(
                    f"no byte comes over RDMA ({device.name}, {failure}): the devices here and at "
                    "the store must reach each other; see --dev-name and --hint-gid-index"
                ) from failure
            undo.pop_all()
        return remote
