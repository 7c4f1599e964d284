"""Runs one command of the CLI: parses its flags, loads its settings, tells errors in a sentence."""

from __future__ import annotations

import argparse
import json
import sys
from errno import EADDRINUSE
from typing import TYPE_CHECKING, Any

from kvrouter.cli import imported
from kvrouter.config_docs import configuration_page
from kvrouter.flags import Loaded, UsageError, add_flags, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.cli import Command


def run_command(command: Command, args: list[str]) -> int:
    """Load the settings of `command` and run it until it ends; returns the exit code."""
    prog = f"kvrouter {command.name}"
    try:
        settings = load_settings(command, args).settings
        reread = lambda: load_settings(command, args).settings  # noqa: E731
        more = (reread,) if command.rereads else ()
        code: int | None = imported(command.run)(settings, *more)
    except UsageError as error:
        return _complain(f"{prog}: {error} (see {prog} --help)")
    except OSError as error:
        remedy = "; give another port" if error.errno == EADDRINUSE else ""
        print(f"{prog}: {error}{remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code or 0


def run_config(commands: Sequence[Command], args: list[str]) -> int:
    """`kvrouter config show COMMAND [flags]` and `kvrouter config docs`."""
    parser = argparse.ArgumentParser(
        prog="kvrouter config", description="Show a command's settings and whence they came."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="values in effect for a command with these flags")
    show.add_argument("command", choices=[c.name for c in commands])
    actions.add_parser("docs", help="print docs/configuration.md")
    command = next((c for c in commands if c.leads(args[1:])), None)
    parsed = parser.parse_args(args[:2] if command is None else [args[0], command.name])
    if parsed.action == "docs":
        page = configuration_page((c.name, c.help, imported(c.settings)) for c in commands)
        print(page, end="")
        return 0
    assert command is not None
    return _show(command, args[1 + len(command.name.split()) :])


def load_settings(command: Command, args: list[str]) -> Loaded[Any]:
    """The validated settings of `command` for these flags.

    Raises:
        UsageError: a value is wrong.
        SystemExit: argparse has printed help (0) or refused the flags (2).
    """
    model = imported(command.settings)
    parser = argparse.ArgumentParser(
        prog=f"kvrouter {command.name}",
        description=f"{command.help[0].upper()}{command.help[1:]}.",
        allow_abbrev=False,
    )
    add_flags(parser, model)
    given = vars(parser.parse_args(args))
    return load(model, given, given.pop("config"))


def _show(command: Command, args: list[str]) -> int:
    try:
        loaded = load_settings(command, args)
    except UsageError as error:
        return _complain(f"kvrouter config: {error} (see kvrouter {command.name} --help)")
    for name, value in loaded.settings.model_dump(mode="json").items():
        print(f"{name}: {json.dumps(value)}  # {loaded.whence.get(name, 'default')}")
    return 0


def _complain(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2
