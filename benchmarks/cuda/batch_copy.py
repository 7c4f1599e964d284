"""cuMemcpyBatchAsync by ctypes: many copies in one call, without a kernel.

CUDA Driver API, section "Memory Management": the function came with CUDA 12.8. Later drivers keep
its first form, with `failIdx`, under the version that is asked for.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

__all__ = ["ARGUMENTS", "Attributes", "BatchCopy"]

CUDA_12_8 = 12080
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_location_hint", _Location),
        ("destination_location_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


_SIZES = ctypes.POINTER(ctypes.c_size_t)
_ADDRESSES = ctypes.POINTER(ctypes.c_uint64)  # CUdeviceptr
ARGUMENTS = (
    *(_ADDRESSES, _ADDRESSES, _SIZES, ctypes.c_size_t),
    *(ctypes.POINTER(Attributes), _SIZES, ctypes.c_size_t, _SIZES, ctypes.c_void_p),
)


@dataclass(frozen=True)
class BatchCopy:
    """The driver's function. `stream`: what it queues copies on; not the default stream."""

    function: Callable[..., int]
    stream: int

    @classmethod
    def of_the_driver(cls) -> Self | None:
        """That of the installed driver with a new stream, or None where it has none."""
        import torch  # noqa: PLC0415 (the types above need none)

        driver = ctypes.CDLL("libcuda.so.1")
        found, symbol = ctypes.c_void_p(), ctypes.c_int()
        wanted = (b"cuMemcpyBatchAsync", ctypes.byref(found), CUDA_12_8, ctypes.c_uint64(0))
        if driver.cuGetProcAddress_v2(*wanted, ctypes.byref(symbol)) or not found.value:
            return None
        function = ctypes.CFUNCTYPE(ctypes.c_int, *ARGUMENTS)(found.value)
        return cls(function, torch.cuda.Stream().cuda_stream)

    def submit(self, to: Sequence[int], source: Sequence[int], sizes: Sequence[int]) -> None:
        """Queue a copy of `sizes[i]` bytes from `source[i]` to `to[i]` for each i.

        RuntimeError with CUDA's number where it is refused.
        """
        count = len(sizes)
        attributes, first, failed = Attributes(IN_STREAM_ORDER), ctypes.c_size_t(), _no_index()
        code = self.function(
            *(_numbers(to), _numbers(source), _numbers(sizes), count),
            *(ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), self.stream),
        )
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync: CUDA error {code}, at copy {failed.value}")


def _numbers(values: Sequence[int]) -> "ctypes.Array[ctypes.c_uint64]":
    return (ctypes.c_uint64 * len(values)).from_buffer(array("Q", values))


def _no_index() -> ctypes.c_size_t:
    return ctypes.c_size_t(ctypes.c_size_t(-1).value)
