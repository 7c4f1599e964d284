"""Who takes part in the store benchmark: memory copies, raw C sockets, and the store itself.

Each moves block i of a working set to or from a peer, some blocks per call; all memory is
touched before anything is timed.
"""

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

from benchmarks.store_servers import library
from kvstore._core import BlockStatus, Segments, copy_crc32c
from kvstore.block import CacheSpec, Layout, Manifest, Part
from kvstore.client import StoreClient

__all__ = [
    "Contender",
    "Copy",
    "Kvstore",
    "Raw",
    "Server",
    "compiled",
    "process_cpu_s",
    "scratch_folder",
    "touched",
]

NATIVE = Path(__file__).parent / "native" / "raw_pair.c"
START_S = 60


class Contender(Protocol):
    """One way to move blocks. `server_pid` is 0 where no other process takes part."""

    name: str
    server_pid: int

    def prepare(self, op: str) -> None:
        """Before each timed round of `op` ('put' or 'get'); not timed."""
        ...

    def put(self, first: int, blocks: int) -> None:
        """Move blocks first..first+blocks to the peer."""
        ...

    def get(self, first: int, blocks: int) -> None:
        """Move them back."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


def touched(size: int) -> mmap.mmap:
    """Anonymous memory with all its pages in place, and not all alike."""
    memory = mmap.mmap(-1, size)
    page = os.urandom(mmap.PAGESIZE)
    for at in range(0, size, mmap.PAGESIZE):
        memory[at : at + mmap.PAGESIZE] = page
        memory[at : at + 8] = at.to_bytes(8, "little")
    return memory


def compiled(folder: Path) -> Path | None:
    """The raw pair, built with the machine's C compiler; None where there is none."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    path = folder / "raw_pair.so"
    command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(path), str(NATIVE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return path if done.returncode == 0 else None


class Server:
    """A server process of benchmarks.store_servers."""

    def __init__(self, kind: str, pool_bytes: int, folder: Path, lib: Path | None = None) -> None:
        self.unix_path = str(folder / f"{kind}.sock")
        command = [sys.executable, "-m", "benchmarks.store_servers", kind]
        command += ["--unix-path", self.unix_path, "--pool-bytes", str(pool_bytes)]
        command += ["--raw-pair", str(lib)] if lib else []
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(json.loads(self._process.stdout.readline())["port"])
        self.pid = self._process.pid

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(START_S)


class Copy:
    """A copy within this process: plain, or fused with CRC32C."""

    server_pid = 0

    def __init__(self, near: mmap.mmap, far: mmap.mmap, block_bytes: int, *, fused: bool) -> None:
        self.name = "memcpy+crc32c" if fused else "memcpy"
        self._near, self._far = memoryview(near), memoryview(far)
        self._block_bytes = block_bytes
        self._fused = fused

    def prepare(self, op: str) -> None:
        """Nothing to do."""

    def put(self, first: int, blocks: int) -> None:
        """Copy out."""
        self._copy(self._far, self._near, first, blocks)

    def get(self, first: int, blocks: int) -> None:
        """Copy in."""
        self._copy(self._near, self._far, first, blocks)

    def close(self) -> None:
        """Let the memory go."""
        self._near.release()
        self._far.release()

    def _copy(self, to: memoryview, source: memoryview, first: int, blocks: int) -> None:
        size = self._block_bytes
        for at in range(first * size, (first + blocks) * size, size):
            if self._fused:
                copy_crc32c(to[at : at + size], source[at : at + size])
            else:
                to[at : at + size] = source[at : at + size]


class Raw:
    """The C pair over one connection."""

    def __init__(
        self, lib: Path, server: Server, near: mmap.mmap, block_bytes: int, *, kind: str, crc: bool
    ) -> None:
        self.name = f"raw C {kind}" + ("+crc32c" if crc else "")
        self.server_pid = server.pid
        self._lib = library(lib)
        if kind == "tcp":
            self._link = socket.create_connection(("127.0.0.1", server.port))
            self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self._link = socket.socket(socket.AF_UNIX)
            self._link.connect(server.unix_path)
        self._link.sendall(block_bytes.to_bytes(8, "little") + bytes([crc]))
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(near))
        self._block_bytes = block_bytes
        self._crc = int(crc)

    def prepare(self, op: str) -> None:
        """Nothing to do: slots are overwritten."""

    def put(self, first: int, blocks: int) -> None:
        """One round trip per block."""
        self._move(self._lib.raw_put, first, blocks)

    def get(self, first: int, blocks: int) -> None:
        """One round trip per block."""
        self._move(self._lib.raw_get, first, blocks)

    def close(self) -> None:
        """Hang up."""
        self._link.close()

    def _move(self, function: object, first: int, blocks: int) -> None:
        assert callable(function)
        size, fd = self._block_bytes, self._link.fileno()
        for block in range(first, first + blocks):
            if function(fd, self._base + block * size, size, block, self._crc):
                raise ConnectionError("the raw pair failed")


class Kvstore:
    """The store's blocking client over one transport. Verifies digests, as it does by default."""

    def __init__(
        self,
        server: Server,
        near: mmap.mmap,
        block_bytes: int,
        blocks: int,
        kind: Literal["shm", "unix", "tcp"],
    ) -> None:
        self.name = f"kvstore {kind}"
        self.server_pid = server.pid
        self._manifest = _manifest(block_bytes)
        self._client = StoreClient(f"kv://127.0.0.1:{server.port}", transport=kind, deadline_s=20)
        self._segments = Segments.over(near, block_bytes, writable=True)
        self._hashes = os.urandom(32 * blocks)
        self._blocks = blocks

    def prepare(self, op: str) -> None:
        """A put finds nothing there, a get everything."""
        self._client.purge()
        if op == "get":
            self.put(0, self._blocks)

    def put(self, first: int, blocks: int) -> None:
        """One call."""
        span = range(first, first + blocks)
        done = self._client.put(self._manifest, 0, self._hashes, span, self._segments, span)
        if done.stored != blocks:
            raise RuntimeError(f"not stored: {done}")

    def get(self, first: int, blocks: int) -> None:
        """One call."""
        span = range(first, first + blocks)
        done = self._client.get_into(self._manifest, 0, self._hashes, span, self._segments, span)
        if done != [BlockStatus.OK] * blocks:
            raise RuntimeError(f"not read: {done}")

    def close(self) -> None:
        """Leave the pool as it was."""
        self._client.purge()
        self._client.close()


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process (user and system, all threads), to the nanosecond; 0 for pid 0.

    The clock id of a process is ~pid << 3 | 2: clock_getcpuclockid(3) on Linux.
    """
    return time.clock_gettime((~pid << 3) | 2) if pid else 0.0


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that goes away with everything in it."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        yield Path(name)


def _manifest(block_bytes: int) -> Manifest:
    spec = CacheSpec("benchmark", "", "uint8", 1, "sha256_cbor", "00" * 32)
    part = Part((0, 1), (0, 1), 0, block_bytes, Layout.opaque("benchmark"))
    return Manifest(spec, (part,))
