"""Writes docs/parameters.md from the tables of all families, so that it cannot go stale.

`python -m kvrouter.tools.docs.parameters > docs/parameters.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.engines.families import FAMILIES
from kvrouter.engines.families.base import LegOrder
from kvrouter.engines.families.table import BOTH, WHERE_SET, Served, Treatment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvrouter.engines.families.base import Family
    from kvrouter.engines.families.table import Parameter

HEAD: Final = """\
# Parameters

<!-- Written by `python -m kvrouter.tools.docs.parameters`; do not edit. -->

What becomes of each member of a completion or chat on each leg, for each family of engines. A
member that is not named is kept on both legs: engines judge it. Where a cell says 400, the error
names the parameter. `/tokenize`: what is *sent* changes the prompt's tokens, and an engine's
`/tokenize` is told of it where the router asks that; with *not asked* given the router does not
ask, and learns the tokens from the prefill leg.
"""
_COLUMNS: Final = ("Parameter", "Served by", "Prefill leg", "Decode leg", "/tokenize", "Why")


def parameters_page(families: Mapping[str, type[Family]]) -> str:
    """The whole page, in Markdown: the first family in full, of others what differs."""
    sections, first = [HEAD], None
    for name, family in families.items():
        rows = family.parameters.rows
        shown = list(rows.values())
        title = f"\n## {name}\n"
        if first is not None:
            base_name, base = first
            shown = [row for row in shown if base.get(row.name) != row]
            gone = ", ".join(f"`{key}`" for key in base if key not in rows)
            told = f" Unknown here: {gone}." if gone else ""
            title += f"\nAs {base_name}, but for these.{told}\n" if shown else ""
            title += "" if shown else f"\nAs {base_name}.{told}\n"
            if family.order is LegOrder.SINGLE:
                title += "There is no prefill leg: all is decoded alone.\n"
        else:
            first = (name, rows)
        sections.append(title)
        if shown:
            sections.append(f"\n{_table(shown)}\n")
    return "".join(sections)


def _table(rows: Iterable[Parameter]) -> str:
    lines = [_line(_COLUMNS), _line("---" for _ in _COLUMNS)]
    lines += [_line(_cells(row)) for row in rows]
    return "\n".join(lines)


def _cells(row: Parameter) -> tuple[str, ...]:
    (kind,) = row.kinds if len(row.kinds) == 1 else ("",)
    name = f"`{row.name}`" if row.kinds == BOTH else f"`{row.name}` ({kind})"
    served = row.served.value + (f" {row.when.text}" if row.when is not WHERE_SET else "")
    if row.served is Served.SPLIT:
        prefill = f"`{row.value.decode()}`" if row.value else row.prefill.value
        prefill += " where given" if row.prefill is Treatment.SET_IF_GIVEN else ""
        decode = row.decode.value
    elif row.when is WHERE_SET:
        prefill, decode = "", row.decode.value if row.served is Served.ALONE else ""
    else:
        prefill, decode = row.prefill.value, row.decode.value
    return (name, served, prefill, decode, row.tokenize.value, row.why)


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


if __name__ == "__main__":
    print(parameters_page(FAMILIES), end="")
