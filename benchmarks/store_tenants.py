"""Cost of a long chain, and of neighbours: `python -m benchmarks.store_tenants [--quick]`.

Two nodes run: one has one tenant, the other has two. A client puts chains of 16,000 blocks of 4 KiB
over TCP, in requests of 1 and of 4,000 blocks. Meanwhile another client sends MATCHes; on the
second node it belongs to the other tenant. The nodes take turns (A B, B A, ...). The ratios are of
pairs: median and 90 % interval. Exit code 1 if with two tenants a block costs more than 1.3 times
as much, or the other client's 99th percentile is more than 1.5 times as long, by the median.
"""

import hashlib
import json
import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import comb
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arguments import parser_of
from kvrouter_store import _core
from kvrouter_store._core import BlockStatus

BLOCK = 4096
DIGEST_LINE = 64
REQUESTS = (1, 4000)
MEMORY = "512MiB"
PATIENCE_S = 60.0
PAUSE_S = 0.001
MOST_COST, MOST_WAIT = 1.3, 1.5
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Round:
    """One client's chains, and the MATCHes of another client meanwhile."""

    us_per_block: float
    match_p50_us: float
    match_p99_us: float


@dataclass(frozen=True)
class Ratio:
    """Ratio of two tenants to one, of paired rounds."""

    median: float
    low: float
    high: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and print the table; 0 if both ratios are within bounds."""
    parser = parser_of("benchmarks.store_tenants", __doc__)
    parser.add_argument("--quick", action="store_true", help="chains of 2,000 blocks, three pairs")
    parser.add_argument("--pairs", type=int, help="rounds of each node (11; with --quick 3)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args(argv)
    pairs = args.pairs or (3 if args.quick else 11)
    figures = measure(pairs, 2000 if args.quick else 16_000)
    print("tenants  blocks per request  us per block  MATCH p50 us  MATCH p99 us")
    for row in figures["rows"]:
        print(
            f"{row['tenants']:7}  {row['blocks_per_request']:18}  {row['us_per_block']:12.1f}"
            f"  {row['match_p50_us']:12.0f}  {row['match_p99_us']:12.0f}"
        )
    well = True
    for blocks, ratios in figures["ratios"].items():
        for what, most in (("us_per_block", MOST_COST), ("match_p99_us", MOST_WAIT)):
            found = Ratio(**ratios[what])
            well = well and found.median <= most
            print(
                f"two tenants to one, {blocks} a request, {what}: {found.median:.2f}"
                f" ({found.low:.2f} to {found.high:.2f}), at most {most}"
            )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if well else 1


def measure(pairs: int, chain: int) -> dict[str, Any]:
    """Run all rounds, the nodes in turn."""
    rounds: dict[tuple[int, int], list[Round]] = {}
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as sites:
        for pair in range(pairs):
            for blocks in REQUESTS:
                order = (1, 2) if pair % 2 == 0 else (2, 1)
                for tenants in order:
                    one = sites[tenants].round(blocks, chain)
                    rounds.setdefault((tenants, blocks), []).append(one)
    rows = [
        {"tenants": tenants, "blocks_per_request": blocks} | medians(of)
        for (tenants, blocks), of in sorted(rounds.items())
    ]
    ratios = {
        blocks: {
            name: asdict(
                ratio(
                    [getattr(r, name) for r in rounds[1, blocks]],
                    [getattr(r, name) for r in rounds[2, blocks]],
                )
            )
            for name in ("us_per_block", "match_p99_us")
        }
        for blocks in REQUESTS
    }
    return {"pairs": pairs, "chain_blocks": chain, "rows": rows, "ratios": ratios}


def medians(rounds: Sequence[Round]) -> dict[str, float]:
    """The median of each figure."""
    return {name: median(getattr(r, name) for r in rounds) for name in asdict(rounds[0])}


def ratio(one: Sequence[float], two: Sequence[float]) -> Ratio:
    """The median of pairs, and its interval with CONFIDENCE by order statistics."""
    found = sorted(b / a for a, b in zip(one, two, strict=True))
    count, skip = len(found), 0
    outside = 1 / 2**count  # the chance that the median lies below the first
    while 1 - 2 * (outside + comb(count, skip + 1) / 2**count) >= CONFIDENCE:
        skip += 1
        outside += comb(count, skip) / 2**count
    return Ratio(median(found), found[skip], found[-1 - skip])


class Link:
    """A connection over TCP after its handshake: one request at a time."""

    def __init__(self, port: int, token: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ask(_core.encode_hello(1, name="bench", token=token))
        digest = hashlib.sha256(b"tenants").digest()
        parts = [(digest, BLOCK)]
        reply = self.ask(
            _core.encode_register(
                1, spec=digest, manifest=digest, engine="bench", refusal="", doc=b"", parts=parts
            )
        )
        self.manifest_id: int = reply.manifest_id

    def ask(self, frame: bytes) -> Any:
        """Send a request; the reply. Raises ConnectionError if the node ends the connection."""
        self._socket.sendall(frame)
        header = _core.decode_header(self._exactly(_core.HEADER_BYTES))
        return _core.decode_reply(header, self._exactly(header.body_bytes))

    def _exactly(self, size: int) -> bytes:
        data = self._socket.recv(size, socket.MSG_WAITALL) if size else b""
        if len(data) != size:
            raise ConnectionError("the node has ended the connection")
        return data

    def close(self) -> None:
        """End it."""
        self._socket.close()


class Site:
    """A node, the client that puts, and the process of the other client."""

    def __init__(self, port: int, tokens: Sequence[str]) -> None:
        self._link = Link(port, tokens[0])
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._neighbour = context.Process(
            target=neighbour, args=(port, tokens[-1], theirs), daemon=True
        )
        self._neighbour.start()
        theirs.close()
        self._chains = 0

    def round(self, blocks: int, chain: int) -> Round:
        """Chains for about a second, with the MATCHes of the other client."""
        self._link.ask(_core.encode_purge(1))
        chains = 1 if blocks == 1 else 4
        frames = [frame for _ in range(chains) for frame in self._frames(blocks, chain)]
        self._pipe.send("begin")
        self._heard()
        began = time.perf_counter()
        for frame in frames:
            statuses = self._link.ask(frame).statuses
            if any(status != BlockStatus.STORED for status in statuses):
                raise RuntimeError("a block was not stored")
        seconds = time.perf_counter() - began
        self._pipe.send("end")
        waits = sorted(self._heard())
        p50, p99 = (waits[int(len(waits) * part)] * 1e6 for part in (0.5, 0.99))
        return Round(seconds / (chains * chain) * 1e6, p50, p99)

    def _heard(self) -> Any:
        if not self._pipe.poll(PATIENCE_S):
            raise RuntimeError("the other client does not answer")
        return self._pipe.recv()

    def _frames(self, blocks: int, chain: int) -> Iterator[bytes]:
        self._chains += 1
        seed = self._chains.to_bytes(4, "little")
        hashes = [hashlib.sha256(seed + i.to_bytes(4, "little")).digest() for i in range(chain)]
        for first in range(0, chain, blocks):
            some = hashes[first : first + blocks]
            parent = hashes[first - 1] if first else None
            head = _core.encode_put(1, self._link.manifest_id, 0, parent, b"".join(some), BLOCK)
            yield head + bytes((BLOCK + DIGEST_LINE) * len(some))

    def close(self) -> None:
        """End the clients."""
        self._pipe.close()
        self._neighbour.join(PATIENCE_S)
        self._neighbour.close()
        self._link.close()


def neighbour(port: int, token: str, pipe: Connection) -> None:
    """Send MATCHes of one block, from each "begin" to the next "end", then print their seconds."""
    link = Link(port, token)
    frame = _core.encode_match(1, link.manifest_id, bytes(32))
    try:
        while pipe.recv() == "begin":
            waits: list[float] = []
            pipe.send("begun")
            while not waits or not pipe.poll(PAUSE_S):
                began = time.perf_counter()
                link.ask(frame)
                waits.append(time.perf_counter() - began)
            pipe.recv()
            pipe.send(waits)
    except EOFError:
        link.close()


@contextmanager
def running(folder: Path) -> Iterator[dict[int, Site]]:
    """The two nodes with their clients, by their number of tenants."""
    processes: list[subprocess.Popen[str]] = []
    sites: dict[int, Site] = {}
    try:
        for tenants in (1, 2):
            tokens = [f"token-of-tenant-{k}" for k in range(tenants)]
            process, port = start(folder / str(tenants), tokens)
            processes.append(process)
            sites[tenants] = Site(port, tokens)
        yield sites
    finally:
        for site in sites.values():
            site.close()
        for process in processes:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
            assert process.stdout is not None
            process.stdout.close()


def start(folder: Path, tokens: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """A node with these tenants' tokens, and its port."""
    folder.mkdir()
    file = folder / "tokens"
    file.touch(mode=0o600)
    file.write_text("".join(f"tenant-{k}:{token}\n" for k, token in enumerate(tokens)))
    command = [str(Path(sys.executable).with_name("kvrouter")), "store", "--port", "0"]
    command += ["--http-port", "0", "--memory", MEMORY, "--granule", "4KiB", "--prefault"]
    command += ["--unix-socket", "none", "--token-file", str(file), "--log-level", "error"]
    command += ["--digests", "off"]  # what is measured is not the bytes
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = process.stdout.readline()
    found = re.search(r"kv://[^ ]*:(\d+)", ready)
    if found is None:
        raise RuntimeError(f"the node did not start: {ready!r}")
    return process, int(found[1])


if __name__ == "__main__":
    sys.exit(main())
