"""Writes docs/parameters.md from the tables of all families.

`python -m kvrouter.tools.docs.parameters > docs/parameters.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.engines.families import FAMILIES
from kvrouter.engines.families.base import Family, LegOrder
from kvrouter.engines.families.parameter_table import BOTH, WHERE_SET, Parameter, Served, Treatment
from kvrouter.tools.docs.markdown import table

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


HEAD: Final = """\
# Parameters

<!-- Written by `python -m kvrouter.tools.docs.parameters`; do not edit. -->

What the router does with each member of a completion or chat on each leg, for each family of
engines. It keeps members that are not listed on both legs, and the engine checks them. A 400 names
the parameter. `/tokenize`: a *sent* member changes the prompt's tokens, so the router sends it when
it asks an engine to tokenize; with *not asked*, the router does not ask, and reads the tokens from
the answer of the prefill leg.
"""
_COLUMNS: Final = ("Parameter", "Served by", "Prefill leg", "Decode leg", "/tokenize", "Why")


def parameters_page(families: Mapping[str, type[Family]]) -> str:
    """The whole page, in Markdown: the first family in full, then differences of the others."""
    first, *others = families
    base = families[first].parameters.rows
    page = f"{HEAD}\n## {first}\n{_rows(base.values())}"
    for name in others:
        rows = families[name].parameters.rows
        shown = [row for row in rows.values() if base.get(row.name) != row]
        gone = ", ".join(f"`{key}`" for key in base if key not in rows)
        page += f"\n## {name}\n\nAs {first}{', except for these' if shown else ''}."
        page += f" Unknown here: {gone}.\n" if gone else "\n"
        if families[name].order is LegOrder.SINGLE:
            page += "There is no prefill leg.\n"
        page += _rows(shown)
    return page


def _rows(rows: Collection[Parameter]) -> str:
    return f"\n{table(_COLUMNS, map(_cells, rows))}\n" if rows else ""


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


if __name__ == "__main__":
    print(parameters_page(FAMILIES), end="")
