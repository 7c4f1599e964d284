"""Memory as a store's node has it: a sealed file without a name, mapped by other processes."""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


@contextmanager
def sealed_file(size: int, *, huge: bool = False) -> Iterator[int]:
    """A file that can neither grow nor shrink; `huge`: of huge pages."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge else 0)
    file = os.memfd_create("pool", flags)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield file
    finally:
        os.close(file)


@contextmanager
def mapped(file: int, size: int, *, writable: bool = True) -> Iterator[int]:
    """The address of the file in memory. OSError: such as where no huge pages are reserved.

    Python's own maps have no address where they are only read.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _LIBC.mmap(None, size, protection, mmap.MAP_SHARED, file, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        yield address
    finally:
        _LIBC.munmap(address, size)


def tensor_at(address: int, size: int) -> torch.Tensor:
    """The memory as bytes. It keeps nothing alive."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
