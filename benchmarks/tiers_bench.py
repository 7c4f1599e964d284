"""The command line of the benchmarks of tiers: a table in Markdown, and every figure as JSON."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arguments import parser_of
from benchmarks.tiers_rig import KINDS


class Bench:
    """What the command line asks for. heads: those of the table's columns."""

    def __init__(self, name: str, docstring: str | None, heads: Sequence[str]) -> None:
        parser = parser_of(name, docstring)
        parser.add_argument("--quick", action="store_true", help="two rounds, of less data")
        parser.add_argument("--json", type=Path, help="write every figure there")
        parser.add_argument("--tiers", nargs="*", choices=KINDS, default=KINDS)
        options = parser.parse_args()
        self.quick: bool = options.quick
        self.tiers: Sequence[str] = options.tiers
        self._json: Path | None = options.json
        self._heads = heads

    def run(self, names: Sequence[str], measured: Callable[[str, Path], Iterator[Any]]) -> int:
        """Print the rows (dataclasses) of each name, measured in a folder of its own."""
        rows = []
        print("| " + " | ".join(self._heads) + " |\n" + "|---" * len(self._heads) + "|")
        for name in names:
            try:
                with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
                    for row in measured(name, Path(folder)):
                        rows.append(row)
                        print(row, flush=True)
            except RuntimeError as error:
                print(f"{name} was left out: {error}", file=sys.stderr)
        if self._json:
            self._json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
        return 0
