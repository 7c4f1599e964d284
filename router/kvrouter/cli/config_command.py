"""`kvrouter config`: shows, checks and describes the settings of the other commands."""

from __future__ import annotations

import json
from typing import Final

from kvrouter.cli.config_schema import json_schema
from kvrouter.cli.main import COMMANDS, Command, find_command, imported
from kvrouter.cli.run_command import complain, load_settings
from kvrouter.options.complaints import UsageError
from kvrouter.tools.docs.configuration import configuration_page

_SERVE: Final = COMMANDS[0]
_USAGES: Final = {
    "show": "kvrouter config show COMMAND [FLAG ...]",
    "check": "kvrouter config check FILE [COMMAND] [FLAG ...]",
    "schema": "kvrouter config schema [COMMAND]",
    "docs": "kvrouter config docs",
}


def run_config(action: str, args: list[str]) -> int:
    """Carry out one of the actions; returns the exit code: 0 success, 2 wrong use or settings."""
    usage = _USAGES[action]
    if args[:1] in (["-h"], ["--help"]):
        print(f"usage: {usage}\n\nCOMMAND is {_names()}; {_SERVE.name} if it is left out.")
        return 0
    try:
        return _run(action, args)
    except UsageError as error:
        return complain(f"kvrouter config {action}: {error} (usage: {usage})")


def _run(action: str, args: list[str]) -> int:
    if action == "docs":
        page = configuration_page((c.name, c.help, imported(c.settings)) for c in COMMANDS)
        print(page, end="")
        return 0
    file = ""
    if action == "check":
        if not args or args[0].startswith("-"):
            raise UsageError("name a FILE of settings")
        file, *args = args
    command, flags = _command(args, needed=action == "show")
    if action == "schema":
        print(json.dumps(json_schema(command.name, imported(command.settings)), indent=2))
        return 0
    return _check(command, file, flags) if file else _show(command, flags)


def _command(args: list[str], *, needed: bool) -> tuple[Command, list[str]]:
    """The command that `args` begin with, or `serve` unless it is `needed`; and the rest.

    Raises:
        UsageError: there is no such command.
    """
    command = find_command(args)
    if command is not None:
        return command, args[len(command.name.split()) :]
    if needed or (args and not args[0].startswith("-")):
        raise UsageError(f"name a COMMAND: {_names()}")
    return _SERVE, args


def _show(command: Command, flags: list[str]) -> int:
    loaded = load_settings(command, flags)
    for sentence in loaded.advice:
        complain(f"kvrouter config: {sentence}")
    for name, value in loaded.settings.model_dump(mode="json").items():
        print(f"{name}: {json.dumps(value)}  # {loaded.origins.get(name, 'default')}")
    return 0


def _check(command: Command, file: str, flags: list[str]) -> int:
    try:
        loaded = load_settings(command, [*flags, "--config", file])
    except UsageError as error:
        for sentence in error.sentences:
            complain(sentence.removeprefix("--config "))
        return 2
    set_here = sum(origin.startswith("file ") for origin in loaded.origins.values())
    print(f"{file}: {set_here} settings of kvrouter {command.name}, nothing wrong")
    return 0


def _names() -> str:
    *names, last = (command.name for command in COMMANDS)
    return f"{', '.join(names)} or {last}"
