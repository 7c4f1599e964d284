"""Every check of the doctor, in the order in which it prints findings of one severity."""

from __future__ import annotations

from inspect import getdoc, isfunction
from typing import TYPE_CHECKING, Final

from kvrouter.tools.docs.markdown import table
from kvrouter.tools.doctor import engines, events, host, sharing, store, tokenizers, trials
from kvrouter.tools.doctor.base import Check

if TYPE_CHECKING:
    from types import ModuleType

TOPICS: Final = {
    "Engines": engines,
    "Shared KV": sharing,
    "Tokens": tokenizers,
    "The store": store,
    "A prompt through both legs": trials,
    "KV events": events,
    "This host": host,
}


def _checks(module: ModuleType) -> list[Check]:
    """The public functions of a module that return `Found`, in their order.

    The name of a check is the function's with dashes, and the first line of its docstring says what
    it ensures.
    """
    return [
        Check(name.replace("_", "-"), (getdoc(one) or "").partition("\n")[0].removesuffix("."), one)
        for name, one in vars(module).items()
        if isfunction(one) and one.__module__ == module.__name__
        if one.__annotations__.get("return") == "Found" and not name.startswith("_")
    ]


CHECKS: Final = tuple(check for module in TOPICS.values() for check in _checks(module))

HEAD: Final = """\
# Checks of kvrouter doctor

<!-- Written by `python -m kvrouter.tools.doctor.registry`; do not edit. -->

What [`kvrouter doctor`](doctor.md) checks:

"""


def checks_page() -> str:
    """The whole of docs/doctor-checks.md, in Markdown."""
    rows = []
    for topic, module in TOPICS.items():
        rows.append((f"**{topic}**", ""))
        rows += [(f"`{check.name}`", check.ensures) for check in _checks(module)]
    return f"{HEAD}{table(('Check', 'What it ensures'), rows)}\n"


if __name__ == "__main__":
    print(checks_page(), end="")
