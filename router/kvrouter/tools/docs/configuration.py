"""Writes docs/configuration.md from the settings models, so that it cannot go stale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from kvrouter.app.reload import ENGINES, KEYS, RELOADED
from kvrouter.options.flags import options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic_settings import BaseSettings

    from kvrouter.options.flags import Option

HEAD = """\
# Configuration

<!-- Written by `kvrouter config docs`; do not edit. -->

Every setting can be given in four ways. A flag wins over the environment, the environment over the
YAML file that `--config FILE` names, the file over the default. `kvrouter config show COMMAND
[flags]` prints the values in effect and whence each came.

In the environment and in YAML a setting has the name shown; lists are written `a,b` or `a b` in the
environment and as lists in YAML.

`kvrouter config check FILE [COMMAND] [flags]` tells all that is wrong with a file: what is unknown,
with the name that it resembles, what stands twice, what cannot be. `kvrouter config schema
[COMMAND]` prints the JSON schema of such files, for editors. Wrong settings end with exit code 2. A
variable of the environment that resembles a setting's and is none is an error, for it would do
nothing. Variables that Kubernetes sets for a Service whose name begins with `kvrouter`
(`KVROUTER_PORT=tcp://10.0.0.1:80`, `KVROUTER_DECODE_SERVICE_HOST`) are ignored, with one warning.

Of a running router SIGHUP changes the settings marked ↻; it reads the file anew, and drops no
stream ([Operations](operations.md#the-settings-file)).
"""


def configuration_page(commands: Iterable[tuple[str, str, type[BaseSettings]]]) -> str:
    """The whole page, in Markdown, for (name, help, settings model) of each command.

    Of a command that takes all settings of one before it, only what is its own is listed.
    """
    sections, before = [HEAD], list[tuple[str, type[BaseModel]]]()
    for name, text, model in commands:
        live = {*ENGINES, *KEYS, *RELOADED} if name == "serve" else frozenset[str]()
        base, shown = next((one for one in before if issubclass(model, one[1])), ("", BaseModel))
        before.append((name, model))
        own = (each for each in options(model) if each.name not in shown.model_fields)
        rows = [_row(option, option.name in live) for option in own]
        table = "\n".join(
            ["| flag | environment | default | meaning |", "|---|---|---|---|", *rows]
        )
        more = f" It takes all that `kvrouter {base}` takes, and:" if base else ""
        sections.append(f"\n## kvrouter {name}\n\n{text[0].upper()}{text[1:]}.{more}\n\n{table}\n")
    return "".join(sections)


def _row(option: Option, live: bool) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    meaning = option.help
    if option.choices:
        meaning += " One of " + ", ".join(f"`{choice}`" for choice in option.choices) + "."
    default = f"`{option.default}`" if option.default else ""
    cells = (flags + " ↻" * live, f"`{option.env}`", default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
