"""A device without a GPU for the checks of benchmarks.cuda: two queues, each with its thread."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.cuda.batch_copy import ARGUMENTS, BatchCopy
from torch import Tensor

ERROR = "an illegal memory access"
LATE_S = 0.05  # how long copies take whose end is said too early


@dataclass(frozen=True)
class QueuedEvent:
    """The end of some copies, or what is `said` instead of it."""

    end: "Future[None]"
    said: bool | None

    def query(self) -> bool:
        if self.said is not None:
            return self.said
        if self.end.done():
            self.end.result()
            return True
        return False


class PretendedGpu:
    """A `Gpu`, and the `Device` of its copies. It does one thing wrong, if `fault` names it.

    "unordered": copies do not wait for what was computed. "early": they are said to have ended
    before they have. "lossy": the last byte of each copy is lost. "forgetful": it works on after an
    error.
    """

    device = "cpu"

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.batch_copy: BatchCopy | None = BatchCopy(
            ctypes.CFUNCTYPE(ctypes.c_int, *ARGUMENTS)(self._batch), 0
        )
        self._broken = False
        self._thread = threading.local()
        self._computing, self._copying = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def copying(self) -> "PretendedGpu":
        return self

    def compute(self, work: Callable[[], None]) -> None:
        self._computing.submit(work)

    def spin(self, seconds: float) -> None:
        self._computing.submit(time.sleep, seconds)

    def corrupt(self) -> None:
        if self.fault != "forgetful":
            self._computing.submit(setattr, self, "_broken", True)

    def synchronize(self) -> None:
        for queue in (self._computing, self._copying):
            queue.submit(lambda: None).result()

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def index(self, indices: list[int]) -> Tensor:
        return torch.tensor(indices)

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._thread.apart = True
        yield

    def run(self, copies: Callable[[], None]) -> QueuedEvent:
        apart = getattr(self._thread, "apart", False)
        ready = (self._copying if apart else self._computing).submit(lambda: None)
        done = self._copying.submit(self._in_order, ready, copies)
        return QueuedEvent(done, True if self.fault == "early" else None)

    def close(self) -> None:
        for queue in (self._computing, self._copying):
            queue.shutdown()

    def _in_order(self, ready: "Future[None]", copies: Callable[[], None]) -> None:
        if self.fault != "unordered":
            ready.result()
        if self._broken:
            raise RuntimeError(ERROR)
        if self.fault == "early":
            time.sleep(LATE_S)
        copies()

    def _batch(self, to: Any, source: Any, sizes: Any, count: int, *more: Any) -> int:
        attributes, first, kinds, failed, stream = more
        assert attributes[0].source_access_order == 1
        assert (first[0], kinds, stream) == (0, 1, None)
        assert failed[0] == 2**64 - 1
        lost = self.fault == "lossy"
        for at in range(count):
            ctypes.memmove(to[at], source[at], sizes[at] - lost)
        return 700 if self._broken else 0


@contextmanager
def pretended_gpu(fault: str = "") -> Iterator[PretendedGpu]:
    gpu = PretendedGpu(fault)
    try:
        yield gpu
    finally:
        gpu.close()
