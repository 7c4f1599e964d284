"""The figures of the store benchmark as JSON, and back."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.store.bars import judge
from benchmarks.store.figures import Cell, Key, Rate
from benchmarks.store.measure import Results

__all__ = ["read", "write"]

KEY_FIELDS = ("size", "op", "batch", "clients")


def write(path: Path, results: Results, machine: dict[str, Any], **how: object) -> None:
    """Write all measurements, and every bar as {value, limit, met}."""
    report = how | {
        "machine": machine,
        "placed": results.placed,
        "versions": results.versions,
        "skipped": results.skipped,
        "cells": [_flat(cell) for cell in results.cells],
        "mixed": [asdict(rate) for rate in results.mixed],
        "matches": [asdict(rate) for rate in results.matches],
        "bars": {name: bar.as_json() for name, bar in judge(results).items()},
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def read(path: Path) -> tuple[Results, dict[str, Any]]:
    """The results and the machine of a file that `write` wrote."""
    report = json.loads(path.read_text())
    results = Results(
        cells=[_cell(flat) for flat in report["cells"]],
        mixed=[Rate(**rate) for rate in report["mixed"]],
        matches=[Rate(**rate) for rate in report["matches"]],
        skipped=report["skipped"],
        versions=report["versions"],
        placed=report["placed"],
    )
    return results, report["machine"]


def _flat(cell: Cell) -> dict[str, Any]:
    figures = asdict(cell)
    key: dict[str, Any] = figures.pop("key")
    return key | figures


def _cell(flat: dict[str, Any]) -> Cell:
    key = Key(**{name: flat.pop(name) for name in KEY_FIELDS})
    return Cell(key, **flat)
