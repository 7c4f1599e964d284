"""A node that is killed with blocks on its SSD: `python -m benchmarks.store_restart [--quick]`.

Puts 2 GiB (--quick: 256 MiB) into a node with a small memory, flushes, kills the node with SIGKILL
during further puts, starts it again, and reads all blocks back, comparing every byte. Figures are
of one run (GB = 1e9 bytes); exit code 1 if a durable block was lost or a wrong byte was served.
"""

import dataclasses
import hashlib
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arguments import parser_of
from kvrouter_store._core import BlockStatus, Segments
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import Layout

MIB = 1 << 20
BLOCK = MIB
CHAIN = 16
DATA_AT = 64 << 10
MEMORY = 256 * MIB
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Figures:
    """The figures of one run."""

    bytes_put: int
    put_gb_per_s_without_disk: float
    put_gb_per_s_with_disk: float
    flush_s: float
    blocks_acknowledged: int
    restart_s: float
    blocks_found: int
    blocks_read_equal: int
    further_blocks_read: int
    wrong_blocks: int
    promotion_gb_per_s: float
    raw_read_gb_per_s: float
    raw_read_is_direct: bool


def main() -> int:
    """Run it and print the figures; 0 if all durable blocks were found and right."""
    parser = parser_of("benchmarks.store_restart", __doc__)
    parser.add_argument("--quick", action="store_true", help="256 MiB instead of 2 GiB")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a new one")
    args = parser.parse_args()
    chains = (256 if args.quick else 2048) // CHAIN
    with tempfile.TemporaryDirectory(dir=args.folder or Path.cwd()) as folder:
        figures = measure(Path(folder), chains)
    for name, value in dataclasses.asdict(figures).items():
        shown = f"{value:.3f}" if isinstance(value, float) else value
        print(f"{name:28} {shown}")
    if args.json:
        args.json.write_text(json.dumps(dataclasses.asdict(figures), indent=1) + "\n")
    whole = figures.blocks_found >= figures.blocks_acknowledged == figures.blocks_read_equal
    return 0 if whole and not figures.wrong_blocks else 1


def measure(folder: Path, chains: int) -> Figures:
    """Run all steps, in one folder of the disk."""
    with Node(folder, disk=False) as node, node.client() as client:
        without = put_all(client, chains)
    node = Node(folder, disk=True, size=(chains + 32) * CHAIN * BLOCK * 5 // 4)
    node.start()
    with node.client() as client:
        with_disk = put_all(client, chains, node)
    started = time.perf_counter()
    acknowledged = node.flush()
    flush_s = time.perf_counter() - started
    further = kill_amid_puts(node)
    restart_s = node.start()
    found = node.stat("disk_durable_blocks")
    with node.client() as client:
        equal, wrong, promotion_s = read_all(client, "first", chains)
        more, more_wrong, _ = read_all(client, "further", further)
    node.stop()
    raw_s, direct = raw_read(folder / "kvstore.data", chains * CHAIN * BLOCK)
    moved = chains * CHAIN * BLOCK
    return Figures(
        bytes_put=moved,
        put_gb_per_s_without_disk=moved / without / 1e9,
        put_gb_per_s_with_disk=moved / with_disk / 1e9,
        flush_s=flush_s,
        blocks_acknowledged=acknowledged,
        restart_s=restart_s,
        blocks_found=found,
        blocks_read_equal=equal,
        further_blocks_read=more,
        wrong_blocks=wrong + more_wrong,
        promotion_gb_per_s=equal * BLOCK / promotion_s / 1e9,
        raw_read_gb_per_s=moved / raw_s / 1e9,
        raw_read_is_direct=direct,
    )


class Node:
    """`kvrouter store` as a process, with or without a disk."""

    def __init__(self, folder: Path, *, disk: bool, size: int = 0) -> None:
        self._command = [str(Path(sys.executable).with_name("kvrouter")), "store", "--port", "0"]
        self._command += ["--http-port", "0", "--memory", str(MEMORY)]
        self._command += ["--unix-socket", str(folder / "bench.sock"), "--log-level", "error"]
        if disk:
            self._command += ["--disk", str(folder), "--disk-size", str(size)]
            self._command += ["--disk-read-timeout", str(DEADLINE_S / 2)]
        self._process: subprocess.Popen[str] | None = None
        self._http = self._url = ""

    def start(self) -> float:
        """Start it; seconds until it is ready."""
        started = time.perf_counter()
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        seconds = time.perf_counter() - started
        found = re.search(r"(kv://\S+) (http://\S+)", ready)
        if found is None:
            raise RuntimeError(f"the node did not start: {ready!r}")
        self._url, self._http = found[1], found[2]
        return seconds

    def client(self) -> StoreClient:
        """A client of it."""
        return StoreClient(self._url, deadline_s=DEADLINE_S)

    def flush(self) -> int:
        """Wait until all blocks are durable; how many."""
        request = urllib.request.Request(f"{self._http}/flush", method="POST")
        with urllib.request.urlopen(request, timeout=120) as answer:
            return int(json.load(answer)["durable_blocks"])

    def stat(self, name: str) -> int:
        """One of its figures."""
        with urllib.request.urlopen(f"{self._http}/stats", timeout=20) as answer:
            return int(json.load(answer)[name])

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait for its end."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(number)
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()

    def stop(self) -> None:
        """SIGTERM."""
        self.end(signal.SIGTERM)

    def __enter__(self) -> "Node":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def put_all(client: StoreClient, chains: int, node: Node | None = None) -> float:
    """Put the chains; the seconds of that.

    With a `node`, wait after each while its queue is long: the node skips blocks that come faster
    than the disk writes, and here all must be durable. The waiting counts.
    """
    memory = bytearray(CHAIN * BLOCK)
    seconds = 0.0
    for k in range(chains):
        hashes = chain_of("first", k)
        fill(memory, hashes)
        started = time.perf_counter()
        put(client, hashes, memory)
        if node is not None and k % 4 == 3:
            node.flush()
        seconds += time.perf_counter() - started
    return seconds


def kill_amid_puts(node: Node) -> int:
    """Kill the node during puts; how many more chains had begun."""
    begun = 0
    ready = threading.Event()

    def storm() -> None:
        nonlocal begun
        memory = bytearray(CHAIN * BLOCK)
        try:
            with node.client() as client:
                while True:
                    hashes = chain_of("further", begun)
                    fill(memory, hashes)
                    begun += 1
                    put(client, hashes, memory)
                    if begun >= 8:
                        ready.set()
        except KVStoreError:
            return

    writer = threading.Thread(target=storm)
    writer.start()
    ready.wait(60)
    node.end(signal.SIGKILL)
    writer.join()
    return begun


def read_all(client: StoreClient, seed: str, chains: int) -> tuple[int, int, float]:
    """Get every chain and compare every byte.

    Returns the number of right blocks, of wrong blocks, and the seconds of the gets.
    """
    memory, wanted = bytearray(CHAIN * BLOCK), bytearray(CHAIN * BLOCK)
    sink = Segments.over(memory, BLOCK, writable=True)
    right, wrong, seconds = 0, 0, 0.0
    for k in range(chains):
        hashes = chain_of(seed, k)
        fill(wanted, hashes)
        started = time.perf_counter()
        got = client.get_into(MANIFEST, 0, hashes, range(CHAIN), sink, range(CHAIN))
        seconds += time.perf_counter() - started
        for i, status in enumerate(got):
            if status == BlockStatus.OK:
                span = slice(i * BLOCK, (i + 1) * BLOCK)
                same = memory[span] == wanted[span]
                right, wrong = right + same, wrong + (not same)
            wrong += status == BlockStatus.CORRUPT
    return right, wrong, seconds


def raw_read(path: Path, size: int) -> tuple[float, bool]:
    """Seconds to read `size` bytes of the data file in pieces of 4 MiB, without the page cache."""
    piece = 4 * MIB
    buffer = mmap.mmap(-1, piece)
    with opened(path) as (descriptor, direct):
        started = time.perf_counter()
        for at in range(DATA_AT, DATA_AT + size - piece, piece):
            os.preadv(descriptor, [buffer], at)
        return time.perf_counter() - started, direct


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, bool]]:
    """The file for reading, with O_DIRECT if its file system supports it."""
    direct = True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        descriptor, direct = os.open(path, os.O_RDONLY), False
    try:
        yield descriptor, direct
    finally:
        os.close(descriptor)


def put(client: StoreClient, hashes: bytes, memory: bytearray) -> None:
    """Put one chain."""
    client.put(MANIFEST, 0, hashes, range(CHAIN), Segments.over(memory, BLOCK), range(CHAIN))


def chain_of(seed: str, number: int) -> bytes:
    """The hashes of one chain."""
    first = f"{seed} {number}".encode()
    return b"".join(hashlib.sha256(first + bytes([k])).digest() for k in range(CHAIN))


def fill(memory: bytearray, hashes: bytes) -> None:
    """Bytes that depend on the hashes: different for all blocks and all pages of a block."""
    for k in range(CHAIN):
        page = hashlib.shake_128(hashes[k * 32 : (k + 1) * 32]).digest(4096)
        for at in range(0, BLOCK, 4096):
            base = k * BLOCK + at
            memory[base : base + 4096] = page
            memory[base : base + 8] = at.to_bytes(8, "little")


MANIFEST = Manifest(
    CacheSpec("restart-benchmark", "", "uint8", 16, "sha256_cbor", "00" * 32),
    (Part((0, 1), (0, 1), 0, BLOCK, Layout.opaque("restart-benchmark")),),
)

if __name__ == "__main__":
    sys.exit(main())
