"""Numbers and tables as text of a known width. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NONE: Final = "-"
LEAST_COLUMN: Final = 4
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_STYLES: Final = {
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34",
    "magenta": "35", "cyan": "36",
}  # fmt: skip
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")


class Paint:
    """Colours text, or leaves it as it is.

    Args:
        on: whether it does.
    """

    def __init__(self, on: bool) -> None:
        self._on = on

    def __call__(self, text: str, *styles: str) -> str:
        """`text` in these styles."""
        if not self._on or not styles or not text:
            return text
        codes = ";".join(_STYLES[style] for style in styles)
        return f"\x1b[{codes}m{text}\x1b[0m"


def plain(text: str) -> str:
    """`text` of somebody else, without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def count(value: float | None) -> str:
    """1234 is 1.23k."""
    if value is None:
        return NONE
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if value == int(value) and not unit else _short(value, unit)
        value /= 1000
    return _short(value, "T")


def seconds(value: float | None) -> str:
    """0.0123 is 12 ms."""
    if value is None:
        return NONE
    if value < 0.9995:
        return f"{value * 1000:.1f} ms" if value < 0.00995 else f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"


def span(value: float) -> str:
    """An age, in its two largest units."""
    whole = int(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def size(value: float) -> str:
    """Bytes: 1536 is 1.50 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return f"{value:.0f} B" if unit == "B" else _short(value, f" {unit}")
        value /= 1024
    return _short(value, " TiB")


def percent(share: float | None) -> str:
    """0.931 is 93.1 %."""
    return NONE if share is None else f"{share * 100:.1f} %"


def bar(share: float, width: int) -> str:
    """A share of 1 as so many cells."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


def spark(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as a line of blocks."""
    shown = list(values[-width:])
    most = max((value for value in shown if value is not None), default=0.0)
    cells = [
        " " if v is None else _BLOCKS[max(1, round(v / most * 8))] if most > 0 else _BLOCKS[1]
        for v in shown
    ]
    return "".join(cells).rjust(width)


def width_of(text: str) -> int:
    """Cells that `text` takes, colours aside."""
    return len(_ESCAPE.sub("", text))


def fitted(text: str, width: int) -> str:
    """`text` in exactly `width` cells; one that is cut loses its colours."""
    cells = width_of(text)
    if cells <= width:
        return text + " " * (width - cells)
    return _ESCAPE.sub("", text)[: max(0, width - 1)] + "…" if width > 0 else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], most: int) -> list[str]:
    """Lines of a table of at most `most` cells a line; the widest column gives way.

    A head that begins with ">" is that of a column of numbers, which stand at its right.
    """
    body = [list(row) for row in rows]
    names = [head.removeprefix(">") for head in heads]
    widths = [
        max(len(name), *(width_of(row[i]) for row in body), 0) for i, name in enumerate(names)
    ]
    while sum(widths) + 2 * (len(widths) - 1) > most and max(widths) > LEAST_COLUMN:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in (names, *body):
        cells = [
            " " * (width - width_of(cell)) + cell
            if heads[i].startswith(">") and width_of(cell) <= width
            else fitted(cell, width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _short(value: float, unit: str) -> str:
    return f"{value:.0f}{unit}" if value >= 99.5 else f"{value:.{1 if value >= 9.95 else 2}f}{unit}"
