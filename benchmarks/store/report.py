"""The figures of the store benchmark as text and as JSON."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.store.bars import Bar, judge
from benchmarks.store.figures import Cell, Key, Rate
from benchmarks.store.measure import Results
from benchmarks.store.plan import BOTH, RANGED, SIZES
from kvrouter_store._core import crc32c_backend

ROW = "{:<26}{:>8}{:>11}{:>11}{:>11}{:>10}"
ORDER = {entry.name: number for number, entry in enumerate(RANGED)}
VIEWS = "kvstore view"
UNVERIFIED = (
    "Verified: the client digests what it puts, the node checks that as it comes, the client "
    "checks what it gets. Unverified: the node has digests off. Other stores have none: the bars "
    "ahead_of_* compare them with the unverified rows, like with like, and ahead_of_*_verified "
    "with the verified ones."
)


def as_json(results: Results, machine: dict[str, Any]) -> dict[str, Any]:
    """All measurements, and every bar as {value, limit, met}."""
    report: dict[str, Any] = {"machine": machine} | asdict(results)
    report["cells"] = [cell.pop("key") | cell for cell in report["cells"]]
    report["bars"] = {n: asdict(b) | {"met": b.met} for n, b in judge(results).items()}
    return report


def lines(results: Results, bars: dict[str, Bar]) -> Iterator[str]:
    """The machine, all cells, the rates, the missing stores, and the bars."""
    yield f"{results.placed}:"
    yield ROW.format("", "GB/s", "p10 us", "p50 us", "p99 us", "CPU s/GB")
    for key in _keys(results.cells):
        yield f"-- {key}"
        cells = [cell for cell in results.cells if cell.key == key]
        yield from map(_row, sorted(cells, key=lambda cell: ORDER[cell.contender]))
    yield "-- mixed put and get of 1 MiB, batches of 16, sustained"
    for rate in results.mixed:
        gb_per_s = rate.per_s * SIZES["1MiB"] / 1e9
        yield f"{rate.contender:<26}{gb_per_s:>8.2f} GB/s, {_clients(rate)}"
    yield "-- match of 64 keys"
    for rate in results.matches:
        yield f"{rate.contender:<26}{rate.per_s:>8.0f} per s, {_clients(rate)}, " + (
            f"{rate.cpu_us:.1f} us of CPU"
        )
    yield UNVERIFIED
    for name, why in results.skipped.items():
        yield f"{name} was left out: {why}"
    for name, bar in bars.items():
        value = "not measured" if bar.value is None else f"{bar.value:,.2f}"
        limit = f"{'at least' if bar.at_least else 'at most'} {bar.limit:,.2f}"
        yield f"{'met   ' if bar.met else 'MISSED'} {name}: {value}, {limit}"
        yield from (f"    {lost}" for lost in bar.lost)


def _row(cell: Cell) -> str:
    moved = "-" if cell.contender.startswith(VIEWS) else f"{cell.gb_per_s:.2f}"
    latencies = (f"{us:.1f}" for us in (cell.p10_us, cell.p50_us, cell.p99_us))
    return ROW.format(cell.contender, moved, *latencies, f"{cell.cpu_s_per_gb:.3f}")


def _keys(cells: Sequence[Cell]) -> list[Key]:
    sizes = list(SIZES)
    return sorted(
        {cell.key for cell in cells},
        key=lambda key: (key.clients, sizes.index(key.size), BOTH.index(key.op), key.batch),
    )


def _clients(rate: Rate) -> str:
    return f"{rate.clients} client" + "s" * (rate.clients > 1)


def facts(loops_ms: Sequence[float]) -> dict[str, Any]:
    """The machine, and the time of a fixed loop on it during the measurement."""
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "crc32c": crc32c_backend(),
        "loop_ms": [round(ms, 2) for ms in (min(loops_ms), median(loops_ms), max(loops_ms))],
    }


def sentence(machine: dict[str, Any]) -> str:
    """The facts in a sentence or two."""
    least, middle, most = machine["loop_ms"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']}, CRC32C by "
        f"{machine['crc32c']}. A fixed loop took {least:.0f} to {most:.0f} ms, median {middle:.0f}:"
        " where they differ, others used the machine."
    )
