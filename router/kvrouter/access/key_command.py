"""`kvrouter key new NAME`: makes a key, shows it once, keeps its hash."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from kvrouter.credentials.caller_keys import NAME, file_line, new_key, read_keys

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_key(args: Sequence[str]) -> int:
    """Make a key; returns the exit code: 0, or 2 for wrong use."""
    parser = argparse.ArgumentParser(
        prog="kvrouter key",
        description="Make a key for a caller: it is printed once, and only its SHA-256 is kept.",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=["new"])
    parser.add_argument("name", metavar="NAME", help="of the caller, as logs and metrics show it")
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="file of --api-key-file to which the hash is added; by default the line for it is "
        "printed after the key",
    )
    given = parser.parse_args(args)
    if not NAME.fullmatch(given.name):
        return _complain(f"{given.name!r}: a name has 1 to 64 letters, digits and . _ @ -")
    key = new_key()
    line = file_line(given.name, key)
    if given.file is None:
        print(key, line, sep="\n")
        return 0
    try:
        _add(given.file, given.name, line)
    except ValueError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"{given.file}: {error.strerror}; give a file that can be written")
    print(key)
    return 0


def _add(path: str, name: str, line: str) -> None:
    """Add a line to the file, which is made where there is none.

    Raises:
        ValueError: the file cannot be used, or has that name already.
        OSError: it cannot be written.
    """
    try:
        there = os.stat(path).st_size > 0
    except FileNotFoundError:
        there = False
    if there and any(key.name == name for key in read_keys(path)):
        raise ValueError(f"{path} has {name!r} already; take another name, or that entry out")
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        ended = not size or os.pread(descriptor, 1, size - 1) == b"\n"
        file.write(f"{'' if ended else chr(10)}{line}\n".encode())


def _complain(sentence: str) -> int:
    print(f"kvrouter key: {sentence}", file=sys.stderr)
    return 2
