"""Copies between shapes beside memcpy: `python -m benchmarks.copy_plans [--quick] [--json FILE]`.

GB/s of bytes written, by the length of the runs that a copy consists of. `halved`: blocks of all KV
heads become those of one of two ranks, so that a run is what its heads have of one token; `turned`:
NHD becomes HND, where a run is one head of one token. Blocks lie in random order on both sides and
are more than caches hold; memcpy copies as many bytes in one call, in turn with them in each round.
Bars: at least 0.7 of memcpy where runs are of 4 KiB or more.
"""

import argparse
import ctypes
import json
import mmap
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.store.bars import Bar
from kvstore._core import Segments
from kvstore.block import CacheSpec, Manifest, Part
from kvstore.copy_plan import CopyPlan
from kvstore.layout import HND, NHD, Layout

RUNS = (64, 256, 1024, 4096, 16384, 65536)
BLOCK_TOKENS, HEADS, ELEMENT_BYTES = 16, 2, 2
MIB = 1 << 20
COPIED_BYTES, LEAST_BLOCK_BYTES = 64 * MIB, MIB // 2
BARRED_RUN, SHARE = 4096, 0.7


@dataclass(frozen=True)
class Case:
    """A way to change the shape, in runs of so many bytes."""

    kind: str
    run_bytes: int

    @property
    def name(self) -> str:
        """Such as halved_4096."""
        return f"{self.kind}_{self.run_bytes}"

    def manifest(self, *, target: bool) -> Manifest:
        """The shape before or after."""
        spec = CacheSpec("m", "r", "bfloat16", BLOCK_TOKENS, "sha256_cbor", "00" * 32)
        elements = self.run_bytes // ELEMENT_BYTES
        heads = (0, 1) if target and self.kind == "halved" else (0, HEADS)
        layers = max(1, LEAST_BLOCK_BYTES // (2 * BLOCK_TOKENS * HEADS * self.run_bytes))
        content = layers * 2 * BLOCK_TOKENS * heads[1] * self.run_bytes
        order = HND if target and self.kind == "turned" else NHD
        layout = Layout.ordered(
            order, tokens=BLOCK_TOKENS, element_bytes=ELEMENT_BYTES, elements=(elements, elements)
        )
        return Manifest(spec, (Part((0, layers), heads, 0, content, layout),))


class Prepared:
    """The memory of a case, all of it touched, and what is timed."""

    def __init__(self, case: Case) -> None:
        source, target = case.manifest(target=False), case.manifest(target=True)
        self.plan = CopyPlan(source, target, 0)
        self.case, each = case, target.block_bytes
        self.blocks = range(max(1, COPIED_BYTES // each))
        self.bytes = len(self.blocks) * each
        self._memory = [_touched(len(self.blocks) * one.block_bytes) for one in (source, target)]
        self._segments = [
            Segments.over(data, one.block_bytes, writable=True)
            for data, one in zip(self._memory, (source, target), strict=True)
        ]
        draw = random.Random(case.run_bytes)
        self._orders = [draw.sample(self.blocks, len(self.blocks)) for _ in range(2)]

    def copy(self) -> None:
        """All blocks, by the plan."""
        places = {0: (self._segments[0], self._orders[0])}
        self.plan.copy(self.blocks, places, self._segments[1], self._orders[1])

    @property
    def source(self) -> mmap.mmap:
        """The memory that is read."""
        return self._memory[0]

    def written(self) -> bytes:
        """The values that the target's bytes have."""
        return bytes(sorted(set(self._memory[1][:])))

    def memcpy(self) -> None:
        """As many bytes in one call."""
        ends = [(ctypes.c_char * self.bytes).from_buffer(data) for data in self._memory]
        ctypes.memmove(ends[1], ends[0], self.bytes)


def _touched(size: int) -> mmap.mmap:
    """Memory that begins with a page, as caches and pools do."""
    memory = mmap.mmap(-1, size)
    memory.write(b"\x01" * size)
    return memory


def seconds(run: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median GB/s of both, and the median of the ratios within a round."""
    ready = Prepared(case)
    ready.copy()
    pairs = [(seconds(ready.memcpy), seconds(ready.copy)) for _ in range(rounds)]
    return {
        "memcpy_gb_per_s": ready.bytes / statistics.median(a for a, _ in pairs) / 1e9,
        "plan_gb_per_s": ready.bytes / statistics.median(b for _, b in pairs) / 1e9,
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def judge(figures: dict[str, dict[str, float]]) -> dict[str, Bar]:
    """Every bar by name; a figure that is missing misses its bar."""
    return {
        f"copy_plan_{case.name}": Bar(figures.get(case.name, {}).get("ratio"), SHARE, at_least=True)
        for case in cases()
        if case.run_bytes >= BARRED_RUN
    }


def cases() -> list[Case]:
    """All that is measured."""
    return [Case(kind, run) for kind in ("halved", "turned") for run in RUNS]


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copy_plans", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds (default: 25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    arguments = parser.parse_args()
    figures = {case.name: measure(case, 7 if arguments.quick else 25) for case in cases()}
    bars = judge(figures)
    print(f"{platform.processor() or platform.machine()}, {COPIED_BYTES // MIB} MiB a copy")
    print(f"{'':16} {'plan GB/s':>10} {'memcpy':>8} {'ratio':>6}")
    for name, found in figures.items():
        plan, floor, ratio = (found[k] for k in ("plan_gb_per_s", "memcpy_gb_per_s", "ratio"))
        print(f"{name:16} {plan:10.2f} {floor:8.2f} {ratio:6.2f}")
    for name, bar in bars.items():
        value = "not measured" if bar.value is None else f"{bar.value:.2f}"
        print(f"  bar {name}: {value} (at least {bar.limit}) {'met' if bar.met else 'MISSED'}")
    if arguments.json:
        told = {name: bar.as_json() for name, bar in bars.items()}
        arguments.json.write_text(json.dumps({"figures": figures, "bars": told}, indent=2) + "\n")


if __name__ == "__main__":
    main()
