"""Eviction policies on traces of real requests: `python -m benchmarks.eviction TRACE...`.

    python -m benchmarks.eviction conversation.jsonl.gz agents.npz [--json FILE]

The store's own table and policies, without bytes, with pools of 1 to 40 % of a trace's distinct
blocks, compared with Belady's MIN, which knows the future. A request hits the leading blocks of its
chain that are there, and puts the others. Saved prefill: a later token costs more to compute
(attention), relative to the first one: 1 + position / QUADRATIC_TOKENS.

TRACE: Mooncake's `*.jsonl.gz` (timestamp in ms, hash_ids), or an npz of arrays t (s), hoff, hid.
Needs a C++ compiler and, for npz, numpy.
"""

import gzip
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.arguments import parser_of
from kvrouter_store._core import EVICTION_POLICIES

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("base", "digest", "wire", "memory", "table")  # the store's table and all below it
PERCENT = (1, 2, 5, 10, 20, 40)
BLOCK_TOKENS = 512  # of both traces
QUADRATIC_TOKENS = 20_000  # where attention costs as much as the rest of the model, 8B to 70B
OURS, OTHER, OPTIMUM = "density", "lru", "min"
MOST_BEHIND, LEAST_CLOSED = 0.003, 0.15

Request = tuple[float, Sequence[int]]  # seconds, names of its chain of blocks


@dataclass(frozen=True)
class Cell:
    """One policy with one pool on one trace: saved shares of tokens and of the prefill's cost."""

    trace: str
    percent: int
    blocks: int
    policy: str
    token_hits: float
    saved_prefill: float


def read_requests(path: Path) -> list[Request]:
    """The requests of a trace, in the order of time."""
    if path.suffix == ".npz":
        import numpy  # noqa: PLC0415 - of this format alone

        with numpy.load(path) as arrays:
            times, offsets, names = (arrays[key].tolist() for key in ("t", "hoff", "hid"))
        found = [(at, names[a:b]) for at, (a, b) in zip(times, pairwise(offsets), strict=True)]
    else:
        with gzip.open(path, "rt") as lines:
            rows = map(json.loads, lines)
            found = [(row["timestamp"] / 1000, row["hash_ids"]) for row in rows]
    return sorted(found, key=lambda request: request[0])


def write_binary(requests: Iterable[Request], path: Path) -> None:
    """Write the requests in the format of native/eviction.cpp."""
    requests = list(requests)
    with path.open("wb") as out:
        out.write(struct.pack("=Q", len(requests)))
        for at_s, names in requests:
            out.write(struct.pack(f"=dQ{len(names)}Q", at_s, len(names), *names))


def compile_replay(folder: Path) -> Path:
    """Compile native/eviction.cpp with the store's sources; returns the program."""
    program = folder / "eviction"
    core = [path for name in FOLDERS for path in (ROOT / "csrc" / name).rglob("*.cpp")]
    main = ROOT / "benchmarks" / "native" / "eviction.cpp"
    command = [os.environ.get("CXX", "c++"), "-O2", "-std=c++20", f"-I{ROOT / 'csrc'}"]
    try:
        subprocess.run([*command, main, *core, "-ldl", "-pthread", "-o", program], check=True)
    except FileNotFoundError as error:
        raise SystemExit("eviction: no C++ compiler: install one or set CXX") from error
    return program


def replay(program: Path, trace: Path, policy: str, blocks: int) -> dict[str, Any]:
    """The program's output."""
    done = subprocess.run(
        [program, trace, policy, str(blocks)], check=True, capture_output=True, text=True
    )
    counts: dict[str, Any] = json.loads(done.stdout)
    return counts


def measure(program: Path, name: str, trace: Path) -> list[Cell]:
    """Measure every policy with every pool."""
    distinct = int(replay(program, trace, EVICTION_POLICIES[0], 1)["distinct"])
    per_block = BLOCK_TOKENS / QUADRATIC_TOKENS

    def cell(case: tuple[int, str]) -> Cell:
        percent, policy = case
        blocks = max(1, distinct * percent // 100)
        counts = replay(program, trace, policy, blocks)
        saved = counts["hits"] + per_block * counts["hits_depth"]
        asked = counts["asked"] + per_block * counts["asked_depth"]
        hits = counts["hits"] / counts["asked"]
        return Cell(name, percent, blocks, policy, hits, saved / asked)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(cell, product(PERCENT, (*EVICTION_POLICIES, OPTIMUM))))


def judge(cells: list[Cell], figure: str) -> tuple[float, float]:
    """The smallest lead over the other policy, and the closed share of its gap to MIN."""
    values = {(c.trace, c.percent, c.policy): float(getattr(c, figure)) for c in cells}
    pools = sorted({(c.trace, c.percent) for c in cells})
    leads = [values[(*pool, OURS)] - values[(*pool, OTHER)] for pool in pools]
    gaps = [values[(*pool, OPTIMUM)] - values[(*pool, OTHER)] for pool in pools]
    return min(leads), mean(leads) / mean(gaps)


def _print(cells: list[Cell]) -> None:
    policies = (*EVICTION_POLICIES, OPTIMUM)
    print(f"{'trace':<24}{'pool':>6}" + "".join(f"{policy:>16}" for policy in policies))
    rows = {(c.trace, c.percent): "" for c in cells}
    for cell in cells:
        shown = f"{100 * cell.token_hits:.2f} {100 * cell.saved_prefill:.2f}"
        rows[cell.trace, cell.percent] += f"{shown:>16}"
    for (trace, percent), row in rows.items():
        print(f"{trace:<24}{percent:>5}%{row}")
    print("per policy: % of tokens hit, % of the prefill's cost saved")


def main() -> int:
    """Exit status: 0 if the figures could be measured."""
    parser = parser_of("benchmarks.eviction", __doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--json", type=Path, help="write every figure and the bars there")
    arguments = parser.parse_args()
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="eviction-") as name:
        program = compile_replay(Path(name))
        for path in arguments.traces:
            binary = Path(name) / path.name
            write_binary(read_requests(path), binary)
            cells += measure(program, path.name.split(".")[0], binary)
    _print(cells)
    bars = {}
    for figure in ("token_hits", "saved_prefill"):
        lead, closed = judge(cells, figure)
        bars[f"{figure}: at most 0.3 points behind"] = lead >= -MOST_BEHIND
        bars[f"{figure}: 15 % of the gap to MIN closed"] = closed >= LEAST_CLOSED
        print(
            f"{figure}: least lead {100 * lead:+.2f} points, {100 * closed:.1f} % of the gap closed"
        )
    for bar, met in bars.items():
        print(f"{'met   ' if met else 'MISSED'} {bar}")
    if arguments.json:
        document = {"cells": [asdict(cell) for cell in cells], "bars": bars}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
