"""Writes docs/configuration.md from the settings models, so that it cannot go stale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.flags import options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic_settings import BaseSettings

    from kvrouter.flags import Option

HEAD = """\
# Configuration

<!-- Written by `kvrouter config docs`; do not edit. -->

Every setting can be given in four ways. A flag wins over the environment, the environment over the
YAML file that `--config FILE` names, the file over the default. `kvrouter config show COMMAND
[flags]` prints the values in effect and whence each came.

In the environment and in YAML a setting has the name shown; lists are written `a,b` or `a b` in the
environment and as lists in YAML.
"""


def configuration_page(commands: Iterable[tuple[str, str, type[BaseSettings]]]) -> str:
    """The whole page, in Markdown, for (name, help, settings model) of each command."""
    sections = [HEAD]
    for name, text, model in commands:
        rows = [_row(option) for option in options(model)]
        table = "\n".join(
            ["| flag | environment | default | meaning |", "|---|---|---|---|", *rows]
        )
        sections.append(f"\n## kvrouter {name}\n\n{text[0].upper()}{text[1:]}.\n\n{table}\n")
    return "".join(sections)


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    meaning = option.help
    if option.choices:
        meaning += " One of " + ", ".join(f"`{choice}`" for choice in option.choices) + "."
    default = f"`{option.default}`" if option.default else ""
    cells = (flags, f"`{option.env}`", default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
