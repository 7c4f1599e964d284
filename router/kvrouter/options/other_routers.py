"""What to give in place of other routers' flags: the rows of docs/migration.md as sentences.

The tables are `other_routers.md`. A flag may end in a value of it, or have a `*`; a code beside it
that is no flag is another value of it, and words in capitals stand for any.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_CODE: Final = re.compile(r"`([^`]+)`")
_LINK: Final = re.compile(r"\[([^]]+)\]\([^)]+\)")
_ANY: Final = {"URL": r"\S+", "PORT": r"\d+", "A,B": r"\S+"}
_OF_ROUTERS: Final = "--decode"


class _Row(NamedTuple):
    flag: str
    value: str  # a pattern; "": any value
    ours: tuple[str, ...]  # flags in its place
    note: str

    @property
    def advice(self) -> str:
        what = f"use {' and '.join(self.ours)}" if self.ours else "leave it out"
        return f"{what}: {self.note}" if self.note else what


def tables() -> list[str]:
    """The tables, in Markdown."""
    text = (files("kvrouter.options") / "other_routers.md").read_text("utf-8")
    return text.strip().split("\n\n")


def instead_of_flag(flag: str, value: str, flags: Collection[str]) -> str:
    """What to do instead of giving a flag that is not one of `flags`; "": no row says it."""
    rows = [row for row in _rows() if fnmatchcase(flag, row.flag) and {*row.ours} <= {*flags}]
    rows.sort(key=lambda row: (bool(row.value), "*" in row.flag))
    usual = rows[0].advice if rows and _OF_ROUTERS in flags else ""
    return instead_of_value(flag, value, flags) or usual


def instead_of_value(flag: str, value: str, flags: Collection[str]) -> str:
    """The same, for a value of a flag, or a list of values as Python writes it."""
    rows = [row for row in _rows() if row.flag == flag and row.value and _OF_ROUTERS in flags]
    words = re.sub(r"[]\[',]", "", value)
    return next((r.advice for r in rows if re.search(rf"(^| ){r.value}( |$)", words)), "")


@cache
def _rows() -> tuple[_Row, ...]:
    lines = (line for table in tables() for line in table.splitlines()[2:])
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return tuple(row for theirs, ours, note in cells for row in _read(theirs, ours, note))


def _read(theirs: str, ours: str, note: str) -> Iterator[_Row]:
    flag, places = "", tuple(_CODE.findall(ours))
    plain = re.sub(r"[`*]", "", _LINK.sub(r"\1", note))
    for code in _CODE.findall(theirs):
        words = code.split()
        if code.startswith("--"):
            flag = words.pop(0)
        yield _Row(flag, " ".join(_ANY.get(each, re.escape(each)) for each in words), places, plain)
