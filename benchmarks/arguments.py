"""The command lines of benchmarks: --help prints the whole docstring of a module."""

import argparse


def parser_of(name: str, docstring: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """A parser for `python -m NAME`."""
    return argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=docstring,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
