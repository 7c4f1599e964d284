"""Whether a GPU may copy to and from the store's memory itself, and what registering it takes.

This decides whether one copy can be saved: out of the GPU into a slot of the store, without a ring.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from benchmarks.cuda.check import Answer
from benchmarks.cuda.gpu import Gpu
from benchmarks.cuda.pool import mapped, sealed_file, tensor_at

GIB = 1 << 30
SIZE = 4 * GIB
READ_ONLY = 8  # cudaHostRegisterReadOnly
KINDS = {
    "read and write": (True, False, 0),
    "read only": (False, False, READ_ONLY),
    "read only, without the flag": (False, False, 0),
    "huge pages": (True, True, 0),
}
"""Whether the map can be written, has huge pages, and the flags of cudaHostRegister."""


def check(gpu: Gpu, size: int = SIZE) -> Answer:
    """A map to read and to write must do; of the others the figures tell what they are good for."""
    found: dict[str, Any] = {}
    for name, (writable, huge, flags) in KINDS.items():
        try:
            with sealed_file(size, huge=huge) as file, mapped(file, size, writable=writable) as at:
                found[name] = _registered(gpu, at, size, writable, flags)
        except (OSError, RuntimeError) as error:
            found[name] = {"failed": str(error).splitlines()[0]}
    usual = found["read and write"]
    if "failed" in usual:
        return Answer(False, f"the store's memory cannot be registered: {usual['failed']}", found)
    says = f"registering takes {usual['s_per_gib']:.2f} s for each GiB"
    works = [name for name, figures in found.items() if "failed" not in figures]
    return Answer(True, f"{says}; it works for maps of: {', '.join(works)}", found)


def _registered(gpu: Gpu, address: int, size: int, writable: bool, flags: int) -> dict[str, float]:
    if writable:  # as a store's memory, which has been written before
        tensor_at(address, size).fill_(1)
    begun = time.perf_counter()
    with registered(address, size, flags):
        took = time.perf_counter() - begun
        part = tensor_at(address, min(size, GIB))
        on_gpu = torch.full((len(part),), 7, dtype=torch.uint8, device=gpu.device)
        figures = {"s_per_gib": took * GIB / size, "in_gb_s": _gb_s(gpu, on_gpu, part)}
        if writable:
            on_gpu.fill_(7)
            figures["out_gb_s"] = _gb_s(gpu, part, on_gpu)
            if int(part.min()) != 7:
                raise RuntimeError("what the GPU wrote is not in the memory")
    return figures


@contextmanager
def registered(address: int, size: int, flags: int = 0) -> Iterator[None]:
    """The memory is pinned for CUDA. RuntimeError where it is refused."""
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(address, size, flags)
    if code.value:
        with suppress(RuntimeError):  # torch reports the error with what it starts next: with this
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"cudaHostRegister: CUDA error {code.value}")
    try:
        yield
    finally:
        runtime.cudaHostUnregister(address)


def _gb_s(gpu: Gpu, to: torch.Tensor, source: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(3):
        gpu.synchronize()
        begun = time.perf_counter()
        to.copy_(source, non_blocking=True)
        gpu.synchronize()
        best = min(best, time.perf_counter() - begun)
    return float(to.nbytes / best / 1e9)
