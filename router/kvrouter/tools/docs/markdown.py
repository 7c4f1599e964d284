"""Tables in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, without a line break at its end."""
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in (heads, *cells)]
    return "\n".join((lines[0], "|" + "---|" * len(heads), *lines[1:]))
