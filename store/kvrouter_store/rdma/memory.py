"""The memory of a client's callers, registered with its device: kept for the next time, bounded.

A registration belongs to the Segments object that describes the memory, and ends with it.
"""

import contextlib
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Final

from kvrouter_store._core import Segments
from kvrouter_store.rdma.base import Device, MemoryRegistration, RdmaUnavailable

MAX_ENTRIES: Final = 256
Span = tuple[int, int]


class MemoryKeys:
    """Which key goes with an address of registered memory."""

    def __init__(self, registrations: Sequence[MemoryRegistration]) -> None:
        ordered = sorted(registrations, key=lambda one: one.address)
        self._starts = [one.address for one in ordered]
        self._keys = [one.lkey for one in ordered]

    def of(self, address: int) -> int:
        """The key of the registration that `address` is in."""
        return self._keys[bisect_right(self._starts, address) - 1]


class MemoryEntry:
    """What is registered of one Segments object, for its blocks up to `blocks`."""

    def __init__(self, device: Device, segments: Segments, blocks: int) -> None:
        self.blocks = blocks
        self.users = 0
        self.segments: weakref.ref[Segments] | None = None
        self._registrations: list[MemoryRegistration] = []
        try:
            for start, end in spans_of(segments, blocks):
                self._registrations.append(device.register(start, end - start, False))
        except RdmaUnavailable:
            self.close()
            raise
        self.keys = MemoryKeys(self._registrations)

    def describes(self, segments: Segments) -> bool:
        """Whether it is of this very object."""
        return self.segments is not None and self.segments() is segments

    def close(self) -> None:
        """Give everything back."""
        while self._registrations:
            self._registrations.pop().close()


class RegisteredMemory:
    """Registers memory with a device when it is first used. Safe in threads.

    At most `most` Segments at a time, but for those in use; the one that was used longest ago goes.
    """

    def __init__(self, device: Device, most: int = MAX_ENTRIES) -> None:
        self._device = device
        self._most = most
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, MemoryEntry] = OrderedDict()
        self._gone: deque[tuple[int, MemoryEntry]] = deque()  # to be given back

    def __len__(self) -> int:
        return len(self._entries)

    @contextlib.contextmanager
    def held(self, segments: Segments, indices: Sequence[int]) -> Iterator[MemoryKeys]:
        """The keys of the memory of these blocks; it stays registered meanwhile.

        Raises RdmaUnavailable where it may not be registered.
        """
        entry = self._take(segments, indices)
        try:
            yield entry.keys
        finally:
            with self._lock:
                entry.users -= 1
            self._reap()

    def close(self) -> None:
        """Give everything back. Nothing of it is in use."""
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        self._reap()
        for entry in entries:
            entry.close()

    def _take(self, segments: Segments, indices: Sequence[int]) -> MemoryEntry:
        self._reap()
        wanted = segments.blocks
        needed = wanted if wanted is not None else max(indices, default=-1) + 1
        key = id(segments)
        with self._lock:
            entry = self._entries.get(key)
            # Another object may have the id of one that is gone; one that is too small goes when
            # its last user has left.
            if entry is None or not entry.describes(segments) or entry.blocks < needed:
                entry = self._enter(key, segments, needed)
            self._entries.move_to_end(key)
            entry.users += 1
        self._reap()
        return entry

    def _enter(self, key: int, segments: Segments, blocks: int) -> MemoryEntry:
        entry = MemoryEntry(self._device, segments, blocks)
        old = self._entries.pop(key, None)
        if old is not None:
            self._gone.append((0, old))
        self._entries[key] = entry

        def forget(_: weakref.ref[Segments]) -> None:
            # Runs in any thread, also in one that holds the lock: then it only takes note.
            self._gone.append((key, entry))
            self._reap()

        entry.segments = weakref.ref(segments, forget)
        for other in [k for k, one in self._entries.items() if not one.users and k != key]:
            if len(self._entries) <= self._most:
                break
            self._gone.append((other, self._entries.pop(other)))
        return entry

    def _reap(self) -> None:
        """Give back what is neither wanted nor in use, unless another thread does so now."""
        if not self._gone or not self._lock.acquire(blocking=False):
            return
        doomed = []
        try:
            for _ in range(len(self._gone)):
                key, entry = self._gone.popleft()
                if self._entries.get(key) is entry:
                    del self._entries[key]
                if entry.users:
                    self._gone.append((0, entry))
                else:
                    doomed.append(entry)
        finally:
            self._lock.release()
        for entry in doomed:
            entry.close()


def spans_of(segments: Segments, blocks: int) -> list[Span]:
    """The runs of memory of blocks 0 to `blocks` - 1; those that overlap are one."""
    spans: list[Span] = []
    if blocks < 1:
        return spans
    for base, stride, size in zip(segments.bases, segments.strides, segments.sizes, strict=True):
        last = base + stride * (blocks - 1)
        if size:
            spans.append((min(base, last), max(base, last) + size))
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
