"""What tests of the store share: small manifests, chains, memory, and a node in its own process."""

import hashlib
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.fakes.patience import eventually
from tests.fakes.stall import stall

from kvrouter_store import _core
from kvrouter_store._core import Segments
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.channel import Access, Channel, Credentials
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import Layout

HASH_BYTES = 32
PATIENCE_S = 20.0
ROOT = Path(__file__).resolve().parent.parent.parent


def manifest_of(block_bytes: int = 4096, *, parts: int = 1, model: str = "tiny") -> Manifest:
    spec = CacheSpec(model, "r1", "float32", 16, "sha256_cbor", "11" * 32)
    layout = Layout.opaque("test engine", {"blocks": "whole"})
    ranks = (Part((0, 2), (k, k + 1), 0, block_bytes, layout) for k in range(parts))
    return Manifest(spec, tuple(ranks))


def chain_of(blocks: int, seed: str = "a") -> bytes:
    """The hashes of `blocks` consecutive blocks; another seed is another chain."""
    found, parent = [], hashlib.sha256(seed.encode()).digest()
    for _ in range(blocks):
        parent = hashlib.sha256(parent).digest()
        found.append(parent)
    return b"".join(found)


def content_of(hash_: bytes, size: int) -> bytes:
    """The bytes that belong to a block: a function of its hash, so that any reader can check."""
    return hashlib.shake_128(hash_).digest(size)


class Memory:
    """An engine's memory: `blocks` blocks that a test fills and looks at."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.data = bytearray(blocks * block_bytes)
        self.segments = Segments.over(self.data, block_bytes, writable=True)

    def __getitem__(self, index: int) -> bytes:
        at = index * self.block_bytes
        return bytes(self.data[at : at + self.block_bytes])

    def __setitem__(self, index: int, value: bytes) -> None:
        at = index * self.block_bytes
        self.data[at : at + self.block_bytes] = value

    def holds(self, hashes: bytes) -> Self:
        """Block k gets what belongs to the k-th hash."""
        for k in range(len(hashes) // HASH_BYTES):
            self[k] = content_of(hashes[k * HASH_BYTES : (k + 1) * HASH_BYTES], self.block_bytes)
        return self


def put_chain(client: StoreClient, manifest: Manifest, hashes: bytes, part: int = 0) -> int:
    """Put every block of the chain with the bytes that belong to it; how many were stored."""
    blocks = len(hashes) // HASH_BYTES
    memory = Memory(blocks, manifest.parts[part].block_bytes).holds(hashes)
    span = range(blocks)
    return client.put(manifest, part, hashes, span, memory.segments, span).stored


def overwrite_stored(unix_path: str, manifest: Manifest, hashes: bytes, data: bytes) -> None:
    """Change the bytes of the first block where they lie in the pool, behind the store's back."""
    deadline = Deadline(PATIENCE_S)
    address = parse_url(f"kv+unix://{unix_path}")
    channel = Channel(address, Credentials("vandal"), deadline, Access.WRITE)
    with StoreClient(f"kv+unix://{unix_path}", transport="unix") as client:
        manifest_id = client.register(manifest).manifest_id
        names = manifest_id, 0, hashes
        held = channel.ask(_core.AcquireReply, deadline, _core.encode_acquire, *names)
        assert channel.pool is not None
        source = Segments.over(data, len(data))
        _core.gather(channel.pool, source, [0], [held.offsets[0]], False)
    channel.discard()


class StoreProcess:
    """A store node as `kvrouter store` runs it, to be killed and started again where it was."""

    def __init__(self, folder: Path, memory: str = "64MiB", *flags: str) -> None:
        self.unix_path = str(folder / "s.sock")
        self.program = ["-c", RUN]
        self._log = folder / "store.log"
        self._memory = memory
        self._flags = flags
        self.port = self.http_port = 0
        self._tls = False
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"{'kvs' if self._tls else 'kv'}://127.0.0.1:{self.port}"

    @property
    def http_url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        command = [sys.executable, *self.program, "--port", str(self.port)]
        command += ["--memory", self._memory]
        command += ["--http-port", str(self.http_port), "--unix-socket", self.unix_path]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._flags], stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        ready = dict(word.split(":", 1) for word in line.split()[2:])
        self._tls = "kvs" in ready
        self.port = int(ready["kvs" if self._tls else "kv"].rsplit(":", 1)[1])
        self.http_port = int(ready["https" if self._tls else "http"].rsplit(":", 1)[1])
        return self

    def kill(self) -> None:
        """kill -9."""
        self.end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        return self.end(signal.SIGTERM)

    def end(self, number: signal.Signals) -> int:
        """Send the signal and wait; the exit code."""
        if self._process is None:
            return 0
        os.kill(self._process.pid, number)
        return self.wait()

    def send(self, number: signal.Signals) -> None:
        """Send the signal and leave it at that, but wait until SIGSTOP has its effect."""
        if number == signal.SIGSTOP:
            stall(self.pid)
        else:
            os.kill(self.pid, number)

    @property
    def log(self) -> str:
        """What it has written to stderr."""
        return self._log.read_text()

    def says(self, text: str) -> bool:
        """Whether its log has this, or has it soon: lines are written by a thread of their own."""
        return eventually(lambda: text in self.log)

    def metric(self, name: str) -> float:
        """The sum of the samples in /metrics whose lines begin so."""
        with urllib.request.urlopen(f"{self.http_url}/metrics") as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        assert self._process is not None
        process, self._process = self._process, None
        code = process.wait(PATIENCE_S)
        assert process.stdout is not None
        process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._process is not None:  # at once: a client on a loop that stands holds its lease
            os.kill(self._process.pid, signal.SIGTERM)
            self.end(signal.SIGINT)


RUN = """
import sys
from kvrouter_store.node.settings import StoreSettings
from kvrouter.app.store_node import run
flags = sys.argv[1:]
names = [flag[2:].replace("-", "_") for flag in flags[::2]]
sys.exit(run(StoreSettings(**dict(zip(names, flags[1::2])))))
"""
