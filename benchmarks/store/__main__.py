"""What the store costs: `python -m benchmarks.store [--quick] [--json FILE] [--markdown]`.

Puts and gets of blocks over shared memory, Unix socket and TCP, each get with and without
verification, beside memcpy, memcpy fused with CRC32C, raw C sockets, and other stores over TCP (as
far as `python -m benchmarks.peers_setup` has set them up). Client processes begin together; rounds
go over all contenders in turn; all memory is prefaulted; every byte that came back is compared.
GB/s of wall time, latency of calls, CPU seconds per GB of clients and server together.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers_setup import NAMES
from benchmarks.store.bars import Bar, judge
from benchmarks.store.figures import Cell
from benchmarks.store.machine import facts, told
from benchmarks.store.measure import Results, measure
from benchmarks.store.plan import FULL, QUICK
from benchmarks.store.table import lines, markdown


def main() -> int:
    """Exit status: 0 when the figures were taken, whatever they say; 2 when they could not be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute, fewer cells")
    parser.add_argument("--json", type=Path, help="write every figure and the bars there")
    parser.add_argument("--markdown", action="store_true", help="print what docs/store.md shows")
    parser.add_argument("--without-peers", action="store_true", help="ours and the floors only")
    arguments = parser.parse_args()
    begun_s = time.monotonic()
    effort = QUICK if arguments.quick else FULL
    peers = () if arguments.without_peers else NAMES
    with tempfile.TemporaryDirectory(prefix="kvb-") as folder:
        try:
            results = measure(effort, Path(folder), peers)
        except RuntimeError as error:
            print(f"store: {error}", file=sys.stderr)
            return 2
    bars, machine = judge(results), facts(results.loops_ms)
    for line in markdown(results) if arguments.markdown else lines(results, bars):
        print(line)
    print(told(machine))
    if arguments.json:
        seconds = time.monotonic() - begun_s
        report = {"seconds": round(seconds, 1), "machine": machine, "effort": asdict(effort)}
        arguments.json.write_text(json.dumps(report | _report(results, bars), indent=2) + "\n")
    return 0


def _report(results: Results, bars: dict[str, Bar]) -> dict[str, Any]:
    return {
        "versions": results.versions,
        "skipped": results.skipped,
        "cells": [_flat(cell) for cell in results.cells],
        "mixed": [asdict(rate) for rate in results.mixed],
        "matches": [asdict(rate) for rate in results.matches],
        "bars": {name: bar.as_json() for name, bar in bars.items()},
    }


def _flat(cell: Cell) -> dict[str, Any]:
    figures = asdict(cell)
    key: dict[str, Any] = figures.pop("key")
    return key | figures


if __name__ == "__main__":
    sys.exit(main())
