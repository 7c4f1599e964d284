"""Writes docs/configuration.md from the settings models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import BaseModel

from kvrouter.app.reload import ENGINES, KEYS, RELOADED
from kvrouter.options.option import Option, options
from kvrouter.tools.docs.markdown import table

if TYPE_CHECKING:
    from collections.abc import Iterable


HEAD = """\
# Configuration

<!-- Written by `kvrouter config docs`; do not edit. -->

You can give every setting as a flag, in the environment, or in the YAML file that `--config FILE`
names. A flag wins over the environment, the environment wins over the file, and the file wins over
the default. `kvrouter config show COMMAND [FLAG ...]` prints the values in effect and the origin of
each.

In YAML a setting has the name of its flag, with `_` or `-`. A list is `a,b` or `a b` in the
environment, and a list in YAML.

`kvrouter config check FILE [COMMAND] [FLAG ...]` prints all that is wrong with a file: unknown
names, names that occur twice, and values that cannot be used. `kvrouter config schema [COMMAND]`
prints the JSON schema of such files, for editors. A command with a wrong setting ends with exit
code 2. So does a command that finds a variable which resembles one of its settings, because that
variable would have no effect. Variables that Kubernetes sets for a Service whose name begins with
`kvrouter` (`KVROUTER_PORT=tcp://10.0.0.1:80`, `KVROUTER_DECODE_SERVICE_HOST`) are ignored with one
warning.

On SIGHUP a running router reads the file again and applies the settings marked ↻ without breaking a
stream ([Operations](operations.md#the-settings-file)).
"""


FIRST: Final = (
    *("prefill", "decode", "store", "policy", "host", "port"),
    *("api_key_file", "control_port", "max_concurrent_requests", "request_timeout_s"),
)
"""Settings of `serve` that most deployments give."""
_COLUMNS: Final = ("Flag", "Environment", "Default", "What it does")


def configuration_page(commands: Iterable[tuple[str, str, type[BaseModel]]]) -> str:
    """The whole page, in Markdown, for (name, help, settings model) of each command.

    A command that takes all settings of an earlier one lists only its own.
    """
    parts, before = [HEAD], list[tuple[str, type[BaseModel]]]()
    for name, text, model in commands:
        live = {*ENGINES, *KEYS, *RELOADED} if name == "serve" else frozenset[str]()
        base, shown = next((one for one in before if issubclass(model, one[1])), ("", BaseModel))
        before.append((name, model))
        more = f" It takes all settings of `kvrouter {base}`, and:" if base else ""
        parts.append(f"\n## kvrouter {name}\n\n{text[0].upper()}{text[1:]}.{more}\n")
        row_of = {option.name: _row(option, option.name in live) for option in options(model)}
        sections: dict[str, list[tuple[str, ...]]] = {}
        if name == "serve":
            sections["The ten that matter first"] = [row_of[each] for each in FIRST]
        for option in options(model):
            if option.name not in shown.model_fields:
                sections.setdefault(option.section, []).append(row_of[option.name])
        for title, rows in sections.items():
            parts.append(f"\n### {title}\n\n{table(_COLUMNS, rows)}\n")
    return "".join(parts)


def _row(option: Option, live: bool) -> tuple[str, ...]:
    value = "" if option.choices or option.kind == "switch" else f" {option.metavar}"
    flags = ", ".join(f"`{flag}{value}`" for flag in option.shown)
    meaning = option.help
    if option.choices:
        meaning += " One of " + ", ".join(f"`{choice}`" for choice in option.choices) + "."
    default = f"`{option.default}`" if option.default else ""
    return (flags + " ↻" * live, f"`{option.env}`", default, meaning)
