"""How fast blocks come from a node's SSD into its memory, beside fio on the same file.

    python -m benchmarks.disk [--folder FOLDER] [--json FILE]

A node that has just started leases chains that only its SSD has. fio reads other parts of the
node's data file in requests of the block's size, as many at a time as the node (io_uring,
O_DIRECT). Nothing is read twice. In pairs, A B B A; of the ratios the median, and the interval that
holds it 19 times of 20.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

from tests.fakes.store import Memory, StoreProcess, chain_of, manifest_of

from benchmarks.arguments import parser_of, write_figures
from kvrouter_store.client.blocking import StoreClient

MIB = 1 << 20
SIZES = {"64 KiB": MIB // 16, "1 MiB": MIB}
CHAIN_BYTES = 256 * MIB
PAIRS = 9
IN_FLIGHT = 32
"""`DiskReader::kMaxReads`."""
DATA_OFFSET = 65536
"""`DiskFile::kDataOffset`."""
FLAGS = ("--prefault", "true", "--disk-read-timeout", "60", "--disk")


def fio(file: Path, block_bytes: int, chain: int) -> float:
    """GB/s of the bytes where the node has put this chain."""
    where = f"--filename={file}", f"--offset={DATA_OFFSET + chain * CHAIN_BYTES}"
    how = f"--size={CHAIN_BYTES}", f"--bs={block_bytes}", f"--iodepth={IN_FLIGHT}"
    fixed = "--name=read --readonly --rw=read --direct=1 --ioengine=io_uring --output-format=json"
    command = ["fio", *fixed.split(), *where, *how]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(told)["jobs"][0]["read"]["bw_bytes"]) / 1e9


def promoted(client: StoreClient, block_bytes: int, chain: int) -> float:
    """GB/s of a lease on this chain."""
    hashes = chain_of(CHAIN_BYTES // block_bytes, str(chain))
    begun = time.perf_counter()
    with client.acquire(manifest_of(block_bytes), hashes) as lease:
        took_s = time.perf_counter() - begun
        if lease.blocks * 32 != len(hashes):
            raise RuntimeError(f"the node has {lease.blocks} blocks of the chain")
    return CHAIN_BYTES / 1e9 / took_s


def written(node: StoreProcess, block_bytes: int, chains: int) -> None:
    """Put the chains one after the other, each durable before the next one."""
    memory = Memory(CHAIN_BYTES // block_bytes, block_bytes)
    memory.data[:] = os.urandom(CHAIN_BYTES)
    span = range(CHAIN_BYTES // block_bytes)
    with StoreClient(node.url) as client:
        for chain in range(chains):
            hashes = chain_of(len(span), str(chain))
            client.put(manifest_of(block_bytes), 0, hashes, span, memory.segments, span)
            urllib.request.urlopen(f"{node.http_url}/flush", data=b"").close()


def measure(folder: Path, block_bytes: int) -> list[tuple[float, float]]:
    """GB/s through the node and by fio, of each pair."""
    chains, pairs = 2 * (PAIRS + 1), []
    disk = str((chains + 1) * CHAIN_BYTES)
    node = StoreProcess(folder, str(4 * CHAIN_BYTES), *FLAGS, str(folder), "--disk-size", disk)
    with node:
        written(node, block_bytes, chains)
    with node, StoreClient(node.url, deadline_s=60) as client:
        for own in range(0, chains, 2):
            through = promoted(client, block_bytes, own) if own % 4 else 0.0
            beside = fio(folder / "kvstore.data", block_bytes, own + 1)
            pairs.append((through or promoted(client, block_bytes, own), beside))
    return pairs[1:]  # the first pair warms up


def main() -> int:
    """Print a line for each size of a block."""
    parser = parser_of("benchmarks.disk", __doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; 6 GB are written")
    options = parser.parse_args()
    figures = {}
    for name, block_bytes in SIZES.items():
        with tempfile.TemporaryDirectory(prefix="kvd-", dir=options.folder) as folder:
            figures[name] = pairs = measure(Path(folder), block_bytes)
        through, beside = (median(rates) for rates in zip(*pairs, strict=True))
        ratios = sorted(one / other for one, other in pairs)
        print(
            f"{name}: {through:.2f} GB/s, fio {beside:.2f} GB/s, "
            f"ratio {median(ratios):.2f} ({ratios[1]:.2f} to {ratios[-2]:.2f})",
            flush=True,
        )
    write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
