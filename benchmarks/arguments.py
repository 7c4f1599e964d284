"""The command lines of benchmarks: --help prints the whole docstring of a module."""

import argparse
import json
from pathlib import Path


def parser_of(
    name: str, docstring: str | None, epilog: str = "", *, figures: bool = True
) -> argparse.ArgumentParser:
    """A parser for `python -m NAME`, with --json where it writes `figures`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=docstring,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if figures:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser


def write_figures(path: Path | None, figures: object) -> None:
    """Write all of it as JSON where --json names a file."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
