"""CUDA: a stream of its own and pinned memory. `make gpu-check` runs it; CI has no GPU."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvrouter_store.tensors.staged import StagedCopier

if TYPE_CHECKING:
    from torch import Tensor


class CudaDevice:
    """The `Device` for one GPU. The caller's stream is the current one of the calling thread."""

    def __init__(self, device: "str | torch.device" = "cuda") -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)

    def host_memory(self, size: int) -> "Tensor":
        """Pinned, so that the GPU copies while the processor goes on."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def index(self, indices: list[int]) -> "Tensor":
        """By way of pinned memory: a copy from other memory would wait for the stream."""
        return torch.tensor(indices).pin_memory().to(self._device, non_blocking=True)

    def run(self, copies: Callable[[], None]) -> "torch.cuda.Event":
        """On the copy stream, after what the current stream has queued so far."""
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            copies()
            done.record(self._stream)
        return done


def cuda_copier(
    device: "str | torch.device" = "cuda", *, slots: int = 4, slot_bytes: int = 16 << 20
) -> StagedCopier:
    """A copier for tensors on a GPU, with `slots` * `slot_bytes` of pinned memory."""
    return StagedCopier(CudaDevice(device), slots=slots, slot_bytes=slot_bytes)
