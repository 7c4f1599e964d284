"""Tensors on a device: blocks pass through a ring of host memory, copied beside the computing."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from kvrouter_store.tensors.base import CopyFailed, NoRoom
from kvrouter_store.tensors.layers import HostBlocks, LayerBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

LOOK_S = 1e-4
"""Between two looks at a copy that runs: an event of a device has no wait with a deadline."""


class Ring:
    """Slots 0 to `slots` - 1, of which each belongs to one owner at a time. Safe in threads."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a ring needs at least one slot, got {slots}")
        self._free = list(range(slots))
        self._changed = threading.Condition()

    def acquire(self, deadline_s: float) -> int:
        """A free slot, the caller's until `release`. Raises NoRoom after `deadline_s` seconds."""
        with self._changed:
            # It looks once more after the deadline, which may have met the wake-up.
            if not self._changed.wait_for(lambda: self._free, deadline_s):
                raise NoRoom(f"no slot of host memory became free within {deadline_s:g} s")
            return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back. ValueError where nobody has it."""
        with self._changed:
            if slot in self._free:
                raise ValueError(f"slot {slot} was given back twice")
            self._free.append(slot)
            self._changed.notify()


class Event(Protocol):
    """A point in the queue of a device."""

    def query(self) -> bool:
        """Whether the device has come to it. RuntimeError: something before it failed."""


class Device(Protocol):
    """What is left to a device; RuntimeError wherever it fails."""

    def host_memory(self, size: int) -> Tensor:
        """`size` bytes that the device copies to and from (uint8, 1-d)."""

    def index(self, indices: list[int]) -> Tensor:
        """Indices on the device, as copies in `run` use them; the processor does not wait."""

    def run(self, copies: Callable[[], None]) -> Event:
        """Queue copies beside the computing, after all that the caller has queued; their end."""


class StagedCopier:
    """A `Copier` through `slots` slots of `slot_bytes` each, allocated at once and owned.

    After the first failed copy it refuses all others: a device that failed may hold anything.
    """

    def __init__(self, device: Device, *, slots: int = 4, slot_bytes: int = 16 << 20) -> None:
        self.device = device
        self.slot_bytes = slot_bytes
        self.ring = Ring(slots)
        self.failure: Exception | None = None
        self._memory = device.host_memory(slots * slot_bytes)
        self._blocks: dict[tuple[int, tuple[int, ...]], HostBlocks] = {}

    def most_blocks(self, layer: LayerBlocks) -> int:
        """As many as a slot has room for."""
        most = self.slot_bytes // layer.block_bytes
        if not most:
            raise ValueError(
                f"a slot of {self.slot_bytes} bytes has no room for a block of {layer.block_bytes}"
            )
        return most

    def stage(self, layer: LayerBlocks, indices: Sequence[int], deadline_s: float) -> _Staged:
        """A slot for at most `most_blocks` blocks."""
        if self.failure is not None:
            raise CopyFailed(f"an earlier copy failed: {self.failure}")
        slot = self.ring.acquire(deadline_s)
        return _Staged(self, layer, indices, slot)

    def slot_memory(self, slot: int) -> Tensor:
        """A slot of the host memory, flat."""
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def slot_blocks(self, slot: int, layer: LayerBlocks) -> HostBlocks:
        """A slot full of such blocks: all of the first tensor, then all of the next."""
        key = slot, tuple(layer.sizes)
        if key not in self._blocks:
            most, base = self.most_blocks(layer), self.slot_memory(slot).data_ptr()
            bases = [base + most * sum(layer.sizes[:at]) for at in range(len(layer.sizes))]
            self._blocks[key] = HostBlocks(bases, layer.sizes, layer.sizes, most)
        return self._blocks[key]

    def close(self) -> None:
        """Free the host memory. After an error of the device, torch may end the process here."""
        self._blocks.clear()  # first of all, what a device has registered of it
        del self._memory


class _Staged:
    """Blocks of a layer in a slot, from its first place on."""

    def __init__(
        self, copier: StagedCopier, layer: LayerBlocks, indices: Sequence[int], slot: int
    ) -> None:
        count, memory = len(indices), copier.slot_memory(slot)
        self.memory = copier.slot_blocks(slot, layer)
        self.indices: Sequence[int] = range(count)
        self._copier, self._slot = copier, slot
        self._event: Event | None = None
        starts = [base - memory.data_ptr() for base in self.memory.bases]
        runs = [memory[at:][: count * size] for at, size in zip(starts, layer.sizes, strict=True)]
        self._pairs = [
            (tensor, run.view(tensor.dtype).view(count, *tensor.shape[1:]))
            for tensor, run in zip(layer.tensors, runs, strict=True)
        ]
        self._at = list(indices)

    def fetch(self) -> None:
        def copies() -> None:
            places = self._places(len(self._at))
            for tensor, memory in self._pairs:
                memory.copy_(tensor[places], non_blocking=True)

        self._run(copies)

    def wait(self, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        try:
            while self._event is not None and not self._event.query():
                if time.monotonic() > end:
                    raise RuntimeError(f"it did not end within {deadline_s:g} s")
                time.sleep(LOOK_S)
        except RuntimeError as error:
            raise self._failed(error) from error

    def deliver(self, blocks: int, deadline_s: float) -> None:
        def copies() -> None:
            places = self._places(blocks)
            for tensor, memory in self._pairs:
                moved = memory[:blocks].to(tensor.device, non_blocking=True)
                tensor[places] = moved

        if blocks:
            self._run(copies)
            self.wait(deadline_s)

    def release(self) -> None:
        # After a failure the device may still write: such a slot is never used again.
        if self._copier.failure is None:
            self._copier.ring.release(self._slot)

    def _places(self, blocks: int) -> slice | Tensor:
        """Where the first blocks are: of a run, a slice, for which the device gathers nothing."""
        at = self._at[:blocks]
        run = range(at[0], at[0] + blocks)
        return slice(run.start, run.stop) if list(run) == at else self._copier.device.index(at)

    def _run(self, copies: Callable[[], None]) -> None:
        try:
            self._event = self._copier.device.run(copies)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CopyFailed:
        self._copier.failure = error
        return CopyFailed(f"a copy between device and host failed: {error}")
