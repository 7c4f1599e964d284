"""The GPU as the checks use it: a queue that computes, and the copier beside it."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from benchmarks.cuda.batch_copy import BatchCopy
from kvrouter_store.tensors.cuda import CudaDevice
from kvrouter_store.tensors.staged import Device, StagedCopier

CALIBRATION_CYCLES = 50_000_000


class Gpu(Protocol):
    """What a check needs; tests have one without a GPU."""

    device: str
    batch_copy: BatchCopy | None
    """None where the driver is too old for it."""

    def copying(self) -> Device:
        """The device below a copier, with a queue of its own."""
        ...

    def compute(self, work: Callable[[], None]) -> None:
        """Queue work on the device behind what the calling thread has queued; returns at once."""
        ...

    def spin(self, seconds: float) -> None:
        """Queue work that takes so long, about, and touches no memory."""
        ...

    def corrupt(self) -> None:
        """Queue work after which the device fails for good."""
        ...

    def apart(self) -> AbstractContextManager[object]:
        """In this context, what the calling thread copies does not wait for what is computed."""
        ...

    def synchronize(self) -> None:
        """Wait for all queues."""
        ...


class CudaGpu:
    """The `Gpu` of CUDA: the current stream computes."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        torch.cuda.init()
        self.batch_copy = BatchCopy.of_the_driver()
        self._cycles_per_s = self._measured()

    def copying(self) -> CudaDevice:
        """A stream of its own."""
        return CudaDevice(self.device)

    def compute(self, work: Callable[[], None]) -> None:
        """CUDA queues what is called."""
        work()

    def spin(self, seconds: float) -> None:
        """A kernel that counts cycles."""
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def corrupt(self) -> None:
        """An index out of range: the kernel's assertion ends the CUDA context."""
        beyond = torch.full((1,), 99, device=self.device)
        torch.zeros(4, device=self.device).index_select(0, beyond)

    def apart(self) -> AbstractContextManager[object]:
        """Every thread begins with the same stream; this is another one."""
        other: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.Stream(self.device))
        return other

    def synchronize(self) -> None:
        """All streams of the device."""
        torch.cuda.synchronize(self.device)

    def _measured(self) -> float:
        torch.cuda._sleep(1000)
        self.synchronize()
        begun = time.perf_counter()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        self.synchronize()
        return CALIBRATION_CYCLES / (time.perf_counter() - begun)


def copier_of(gpu: Gpu, slots: int, slot_bytes: int) -> StagedCopier:
    """A copier of the product on this GPU."""
    return StagedCopier(gpu.copying(), slots=slots, slot_bytes=slot_bytes)
