"""What a large body took does not stay with the process."""

import ctypes
import subprocess
import sys

import pytest

from kvrouter.http.server.large_blocks import LARGE_BYTES

PROGRAM = """
import ctypes
from kvrouter.http.server.large_blocks import return_large_blocks
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd".split()]
    _fields_ += [(f"more{n}", ctypes.c_size_t) for n in range(5)]
libc.mallinfo2.restype = Info
return_large_blocks() if SET else None
libc.free(libc.malloc(20 << 20))
before = libc.mallinfo2().hblkhd
kept = libc.malloc(BYTES)
print(libc.mallinfo2().hblkhd - before >= BYTES)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="no mallinfo2: run with glibc 2.33"
)
@pytest.mark.parametrize(
    ("called", "size", "apart"),
    [(True, LARGE_BYTES, True), (True, LARGE_BYTES // 2, False), (False, 1 << 20, False)],
)
def test_a_large_block_is_apart_after_a_larger_one_too(
    called: bool, size: int, apart: bool
) -> None:
    program = PROGRAM.replace("SET", str(called)).replace("BYTES", str(size))
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(apart)
