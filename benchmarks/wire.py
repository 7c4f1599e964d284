"""Router CPU of a request and of a streamed event, compared with sglang-router and smg.

    python -m benchmarks.wire [--quick] [--json FILE]

The router under test has one core; load, mock engines and store have the other. Samples of all
routers are interleaved; figures are medians of the CPU time of all threads, not of wall time.
Policy, KV events, store and landing, metrics and one log line per request are on.
"""

import platform
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.arguments import parser_of, write_figures
from benchmarks.wire_prompts import SHAPES, SIZES, Shape, prompts, write_bodies
from benchmarks.wire_rig import leave_in_order
from benchmarks.wire_stage import PEERS, Answers, Router, Stage, set_stage

IDS, LEAST, TEXT = "ids, prefix", "text, least_tokens", "text, prefix"
CONNECTIONS = 32
WARM_UP_S = 0.7
STREAMS = ((64, 50), (256, 20), (1000, 20))  # streams, events per second of each


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    rounds: int
    request_s: float
    stream_s: float


QUICK = Effort(rounds=3, request_s=1.2, stream_s=2.5)
FULL = Effort(rounds=7, request_s=3.0, stream_s=6.0)


@dataclass(frozen=True)
class Workload:
    """Bodies and how they are sent; CPU is divided by the number of `unit`s."""

    name: str
    unit: str
    bodies: Path
    texts: tuple[str, ...]  # of the prompts; empty for token ids
    connections: int
    seconds: float
    pace_per_s: int = 0


@dataclass(frozen=True)
class Cell:
    """One router under one workload: medians over the rounds."""

    router: str
    workload: str
    unit: str
    router_us: float
    store_us: float
    tokenising_us: float  # spent in engines, beside router_us; measured with the router's tokenizer
    per_s: float
    latency_p50_us: float
    samples: int


# How often a text prompt is tokenised in engines: once per leg that is sent text.
ENGINE_TOKENISINGS = {IDS: 0, LEAST: 1, TEXT: 0, **dict.fromkeys(PEERS, 2)}


def _request_workloads(folder: Path, effort: Effort, shape: Shape) -> list[Workload]:
    made = []
    for name, size in SIZES.items():
        asked = prompts(shape, size)
        path = write_bodies(folder, f"{shape}-{size}", asked)
        texts = tuple(prompt.text for prompt in asked if prompt.text)
        made.append(Workload(name, "request", path, texts, CONNECTIONS, effort.request_s))
    return made


def _stream_workloads(folder: Path, effort: Effort, shape: Shape) -> list[Workload]:
    made = []
    for streams, pace in STREAMS:
        count = int(pace * effort.stream_s)
        asked = prompts(shape, SIZES["short"], max_tokens=count, stream=True)
        path = write_bodies(folder, f"{shape}-{streams}-streams", asked)
        name = f"{streams} streams x {pace}/s"
        made.append(Workload(name, "event", path, (), streams, 20 + effort.stream_s, pace))
    return made


def _plan(stage: Stage, folder: Path, effort: Effort) -> list[tuple[Router, str, Workload]]:
    """Every sample of one round, in order: routers take turns in each workload."""
    requests = [_request_workloads(folder, effort, shape) for shape in SHAPES]
    streams = [_stream_workloads(folder, effort, shape) for shape in SHAPES]
    prefix, least = stage.prefix, stage.least_tokens
    plan: list[tuple[Router, str, Workload]] = []
    for with_ids, with_text in zip(*requests, strict=True):
        plan.append((prefix, IDS, with_ids))
        plan.append((least, LEAST, with_text))
        plan.append((prefix, TEXT, with_text))
        plan.extend((peer, peer.process.name, with_text) for peer in stage.peers)
    for with_ids, with_text in zip(*streams, strict=True):
        plan.append((prefix, IDS, with_ids))
        plan.append((least, LEAST, with_text))
        plan.extend((peer, peer.process.name, with_text) for peer in stage.peers)
    return plan


def _measure(stage: Stage, effort: Effort, folder: Path) -> list[Cell]:
    plan = _plan(stage, folder, effort)
    seen: dict[tuple[str, Workload], list[Answers]] = defaultdict(list)
    for router, _, workload in plan:
        if workload.unit == "request":
            stage.load(router, workload.bodies, workload.connections, WARM_UP_S)
    for _ in range(effort.rounds):
        for router, name, workload in plan:
            try:
                how = (workload.bodies, workload.connections, workload.seconds)
                answers = stage.load(router, *how, workload.pace_per_s)
            except RuntimeError as error:  # one sample, not the run: the others count
                stage.notes.append(f"a sample was lost: {str(error).splitlines()[0]}")
                continue
            seen[name, workload].append(answers)
    return [
        _cell(
            router, workload, samples, ENGINE_TOKENISINGS[router] * _tokenising_us(stage, workload)
        )
        for (router, workload), samples in seen.items()
    ]


def _tokenising_us(stage: Stage, workload: Workload) -> float:
    if stage.tokenizer is None or not workload.texts:
        return 0.0
    return statistics.median(stage.tokenizer.cost_us(workload.texts) for _ in range(5))


def _cell(router: str, workload: Workload, samples: list[Answers], tokenising_us: float) -> Cell:
    unit = workload.unit

    def median(values: Iterable[float]) -> float:
        return round(statistics.median(values), 2)

    def units(answers: Answers) -> int:
        return answers.events if unit == "event" else answers.answered

    return Cell(
        router,
        workload.name,
        unit,
        tokenising_us=round(tokenising_us, 2),
        router_us=median(a.router_s / units(a) * 1e6 for a in samples),
        store_us=median(a.store_s / units(a) * 1e6 for a in samples),
        per_s=median(units(a) / a.seconds for a in samples),
        latency_p50_us=median(
            a.first_event_p50_us if unit == "event" else a.latency_p50_us for a in samples
        ),
        samples=len(samples),
    )


def bars(cells: list[Cell]) -> dict[str, bool]:
    """Ours at most 1.0x a peer's CPU, cell by cell; false if the peer is missing."""
    prices = {(cell.router, cell.workload): cell.router_us for cell in cells}
    return {
        f"{ours}: {workload} <= 1.0x {peer}": prices.get((ours, workload), float("inf"))
        <= prices.get((peer, workload), -1.0)
        for workload in dict.fromkeys(cell.workload for cell in cells)
        for ours in (IDS, LEAST)
        for peer in PEERS
    }


def _print(cells: list[Cell]) -> None:
    prices = {(cell.router, cell.workload): cell.router_us for cell in cells}
    peers = [f"/ {peer}" for peer in PEERS]
    heads = ("CPU us per unit", "", "router", *peers, "store", "tokenising", "per s")
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell.unit != "request", cell.workload)):
        theirs = [prices.get((peer, cell.workload)) for peer in PEERS]
        ratios = [cell.router_us / each if each else None for each in theirs]
        costs = (cell.store_us, cell.tokenising_us, cell.per_s)
        rows.append((cell.workload, cell.router, cell.router_us, *ratios, *costs))
    digits = ("", "", ".1f", *(".2f" for _ in PEERS), ".1f", ".1f", ".0f")
    print(tabulate(rows, heads, tablefmt="plain", floatfmt=digits, missingval="-"))


def run(effort: Effort) -> dict[str, Any]:
    """Start all processes, measure, and stop them; the report."""
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="wire-")))
        stage = cleanup.enter_context(set_stage(folder))
        cells = _measure(stage, effort, folder)
        notes = stage.notes
        loops_ms = stage.loops_ms
    least_ms, loop_ms, most_ms = min(loops_ms), statistics.median(loops_ms), max(loops_ms)
    notes.append(
        f"a fixed loop on the router's core took {least_ms:.0f} to {most_ms:.0f} ms, median "
        f"{loop_ms:.0f}: where they differ, others used the machine, and figures are too high"
    )
    _print(cells)
    held = bars(cells)
    report: dict[str, Any] = {
        "machine": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "loop_ms": [least_ms, loop_ms, most_ms],
        },
        "effort": asdict(effort),
        "notes": notes,
        "cells": [asdict(cell) for cell in cells],
        "bars": held,
    }
    for note in notes:
        print(f"note: {note}")
    for name, holds in held.items():
        print(f"{'holds ' if holds else 'MISSED'}  {name}")
    return report


def main() -> int:
    """Exit status: 0 if the figures could be measured, else 2."""
    parser = parser_of("benchmarks.wire", __doc__)
    parser.add_argument("--quick", action="store_true", help="under five minutes")
    arguments = parser.parse_args()
    leave_in_order()
    try:
        report = run(QUICK if arguments.quick else FULL)
    except RuntimeError as error:
        print(f"wire: {error}", file=sys.stderr)
        return 2
    write_figures(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
