"""What the store costs: `python -m benchmarks.store [--quick] [--json FILE]`.

Puts and gets of blocks over shared memory, Unix socket and TCP, beside memcpy, memcpy fused with
CRC32C and a raw C socket pair. GB/s of wall time and CPU seconds per GB, client and server together
(GB = 1e9 bytes). All memory is prefaulted, rounds are interleaved, figures are medians.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.store_contenders import (
    Contender,
    Copy,
    Kvstore,
    Raw,
    Server,
    compiled,
    process_cpu_s,
    scratch_folder,
    touched,
)
from kvstore._core import crc32c_backend

KIB, MIB = 1024, 1024 * 1024
SIZES = {"64KiB": 64 * KIB, "1MiB": MIB, "4MiB": 4 * MIB}
BATCHES = {"64KiB": (1, 16), "1MiB": (1, 16), "4MiB": (1, 4)}
OPS = ("put", "get")
BAR = 1.15


@dataclass(frozen=True)
class Sample:
    """One timed round of one cell."""

    seconds: float
    cpu_s: float
    moved_bytes: int


@dataclass(frozen=True)
class Cell:
    """The medians of one contender at one size, batch and operation."""

    op: str
    size: str
    batch: int
    contender: str
    gb_per_s: float
    cpu_s_per_gb: float
    call_us: float
    rounds: int


def main() -> int:
    """Run everything, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller working set")
    parser.add_argument("--json", type=Path, help="write every figure and the bars there")
    args = parser.parse_args()
    rounds, set_bytes = (4, 64 * MIB) if args.quick else (9, 128 * MIB)
    started = time.monotonic()
    cells = [cell for size in SIZES for cell in _measure(size, rounds, set_bytes)]
    _print(cells)
    ratios, bars = _judge(cells)
    for name, ratio in ratios.items():
        verdict = f"bar {BAR}x  {'ok' if bars[name] else 'MISSED'}" if name in bars else ""
        print(f"{name:30} {ratio:6.2f}x of its floor  {verdict}".rstrip())
    if args.json:
        _write(args.json, cells, ratios, bars, time.monotonic() - started)
    return 0


def _measure(size: str, rounds: int, set_bytes: int) -> list[Cell]:
    block_bytes = SIZES[size]
    blocks = set_bytes // block_bytes
    with contextlib.ExitStack() as stack:
        contenders = _contenders(stack, block_bytes, blocks)
        samples: dict[tuple[str, int, str], list[Sample]] = {}
        for round_number in range(rounds + 1):
            for op in OPS:
                for batch in BATCHES[size]:
                    for one in contenders:
                        sample = _round(one, op, blocks, batch, block_bytes)
                        if round_number:  # the first one touches what is left to touch
                            samples.setdefault((op, batch, one.name), []).append(sample)
    return [_cell(op, size, batch, name, got) for (op, batch, name), got in samples.items()]


def _contenders(stack: contextlib.ExitStack, block_bytes: int, blocks: int) -> list[Contender]:
    folder = stack.enter_context(scratch_folder())
    set_bytes = block_bytes * blocks
    near, far = touched(set_bytes), touched(set_bytes)
    contenders: list[Contender] = [
        Copy(near, far, block_bytes, fused=False),
        Copy(near, far, block_bytes, fused=True),
    ]
    lib = compiled(folder)
    if lib is not None:
        raw = Server("raw", set_bytes, folder, lib)
        stack.callback(raw.close)
        contenders += [
            Raw(lib, raw, near, block_bytes, kind=kind, crc=crc)
            for kind in ("unix", "tcp")
            for crc in (False, True)
        ]
    store = Server("kvstore", set_bytes + 16 * MIB, folder)
    stack.callback(store.close)
    contenders += [
        Kvstore(store, near, block_bytes, blocks, "shm"),
        Kvstore(store, near, block_bytes, blocks, "unix"),
        Kvstore(store, near, block_bytes, blocks, "tcp"),
    ]
    for one in contenders:
        stack.callback(one.close)
    return contenders


def _round(one: Contender, op: str, blocks: int, batch: int, block_bytes: int) -> Sample:
    one.prepare(op)
    move = one.put if op == "put" else one.get
    cpu_s = time.process_time() + process_cpu_s(one.server_pid)
    started = time.perf_counter()
    for first in range(0, blocks, batch):
        move(first, batch)
    seconds = time.perf_counter() - started
    cpu_s = time.process_time() + process_cpu_s(one.server_pid) - cpu_s
    return Sample(seconds, cpu_s, blocks * block_bytes)


def _cell(op: str, size: str, batch: int, name: str, samples: list[Sample]) -> Cell:
    moved = samples[0].moved_bytes
    calls = moved // (SIZES[size] * batch)
    seconds = median(sample.seconds for sample in samples)
    cpu_s = median(sample.cpu_s for sample in samples)
    return Cell(
        op=op,
        size=size,
        batch=batch,
        contender=name,
        gb_per_s=moved / seconds / 1e9,
        cpu_s_per_gb=cpu_s / (moved / 1e9),
        call_us=seconds / calls * 1e6,
        rounds=len(samples),
    )


def _judge(cells: list[Cell]) -> tuple[dict[str, float], dict[str, bool]]:
    """CPU per GB against the floor of the same row, and the bars on batched calls of 1 MiB up.

    A floor that is missing (no C compiler) misses the bar.
    """
    cpu = {(c.op, c.size, c.batch, c.contender): c.cpu_s_per_gb for c in cells}
    floors = {"shm": "memcpy+crc32c", "unix": "raw C unix+crc32c", "tcp": "raw C tcp+crc32c"}
    ratios = {}
    for (op, size, batch, contender), cost in cpu.items():
        kind = contender.removeprefix("kvstore ")
        if kind in floors:
            floor = cpu.get((op, size, batch, floors[kind]), 0.0)
            name = f"{kind}_{size.lower()}_{op}_x{batch}"
            ratios[name] = cost / floor if floor else float("inf")
    bars = {
        name: ratio <= BAR
        for name, ratio in ratios.items()
        if "_64kib_" not in name and not name.endswith("_x1")
    }
    return ratios, bars


def _print(cells: list[Cell]) -> None:
    row = "{:4} {:>6} {:>3}  {:20} {:>8} {:>9} {:>10}"
    print(row.format("op", "size", "x", "contender", "GB/s", "CPU s/GB", "us/call"))
    for c in sorted(cells, key=lambda c: (c.size, c.op, c.batch)):
        figures = (f"{c.gb_per_s:.2f}", f"{c.cpu_s_per_gb:.3f}", f"{c.call_us:.1f}")
        print(row.format(c.op, c.size, c.batch, c.contender, *figures))


def _write(
    path: Path,
    cells: list[Cell],
    ratios: dict[str, float],
    bars: dict[str, bool],
    seconds: float,
) -> None:
    figures = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "python": sys.version.split()[0],
        "crc32c": crc32c_backend(),
        "seconds": seconds,
        "cells": [asdict(cell) for cell in cells],
        "cpu_ratios": {k: v if v != float("inf") else None for k, v in ratios.items()},
        "bars": bars,
    }
    path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
