"""`kvrouter config`: shows, checks and describes the settings of the other commands."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Final

from kvrouter.cli.config_schema import json_schema
from kvrouter.cli.main import imported
from kvrouter.cli.run_command import complain, load_settings
from kvrouter.options.flags import UsageError
from kvrouter.tools.docs.configuration import configuration_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.cli.main import Command

_UNLESS_NAMED: Final = "serve"
_USAGE: Final = """kvrouter config show COMMAND [FLAG ...]
       kvrouter config check FILE [COMMAND] [FLAG ...]
       kvrouter config schema [COMMAND]
       kvrouter config docs"""


def run_config(commands: Sequence[Command], args: list[str]) -> int:
    """Carry out one of the actions; returns the exit code: 0 well, 2 wrong use or wrong settings.

    COMMAND is `serve` where it may be left out. `check` and `show` take what the command itself
    would take: its flags, and the environment.
    """
    parser = argparse.ArgumentParser(
        prog="kvrouter config",
        usage=_USAGE,
        description="show: the values in effect for a command with these flags, and whence each "
        "came. check: all that is wrong with a file of settings. schema: the JSON schema of such "
        "files. docs: docs/configuration.md.",
        epilog=f"COMMAND is one of {', '.join(c.name for c in commands)}; without it: "
        f"{_UNLESS_NAMED}.",
    )
    parser.add_argument("action", choices=["show", "check", "schema", "docs"])
    action = parser.parse_args(args[:1]).action
    rest = args[1:]
    if action == "docs":
        page = configuration_page((c.name, c.help, imported(c.settings)) for c in commands)
        print(page, end="")
        return 0
    file = rest.pop(0) if action == "check" and rest and not rest[0].startswith("-") else ""
    command = next((c for c in commands if c.leads(rest)), None)
    if command is not None:
        rest = rest[len(command.name.split()) :]
    elif action == "show" or (rest and not rest[0].startswith("-")):
        parser.error(f"{action}: name a COMMAND")
    command = command or next(c for c in commands if c.name == _UNLESS_NAMED)
    if action == "show":
        return _show(command, rest)
    if action == "schema":
        print(json.dumps(json_schema(command.name, imported(command.settings)), indent=2))
        return 0
    if not file:
        parser.error("check: name a FILE")
    return _check(command, file, rest)


def _show(command: Command, flags: list[str]) -> int:
    try:
        loaded = load_settings(command, flags)
    except UsageError as error:
        return complain(f"kvrouter config: {error} (see kvrouter {command.name} --help)")
    for sentence in loaded.advice:
        print(f"kvrouter config: {sentence}", file=sys.stderr)
    for name, value in loaded.settings.model_dump(mode="json").items():
        print(f"{name}: {json.dumps(value)}  # {loaded.whence.get(name, 'default')}")
    return 0


def _check(command: Command, file: str, flags: list[str]) -> int:
    try:
        loaded = load_settings(command, [*flags, "--config", file])
    except UsageError as error:
        for sentence in error.sentences:
            print(sentence.removeprefix("--config "), file=sys.stderr)
        return 2
    set_here = sum(origin.startswith("file ") for origin in loaded.whence.values())
    print(f"{file}: {set_here} settings of kvrouter {command.name}, nothing wrong")
    return 0
