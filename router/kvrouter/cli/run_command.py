"""Runs one command of the CLI: parses its flags, loads its settings, tells errors in a sentence."""

from __future__ import annotations

import sys
from errno import EADDRINUSE
from typing import TYPE_CHECKING, Any

from kvrouter.cli.main import COMMANDS, imported
from kvrouter.options.flags import FlagParser, Loaded, UsageError, add_flags, load, options

if TYPE_CHECKING:
    from kvrouter.cli.main import Command


def run_command(command: Command, args: list[str]) -> int:
    """Load the settings of `command` and run it until it ends; returns the exit code."""
    prog = f"kvrouter {command.name}"
    try:
        loaded = load_settings(command, args)
        settings = loaded.settings
        for sentence in loaded.advice:
            print(f"{prog}: {sentence}", file=sys.stderr)
        reread = lambda: load_settings(command, args).settings  # noqa: E731
        more = (reread,) if command.rereads else ()
        code: int | None = imported(command.run)(settings, *more)
    except UsageError as error:
        return complain(f"{prog}: {error} (see {prog} --help)")
    except OSError as error:
        remedy = "; give another port" if error.errno == EADDRINUSE else ""
        print(f"{prog}: {error}{remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code or 0


def load_settings(command: Command, args: list[str]) -> Loaded[Any]:
    """The validated settings of `command` for these flags.

    Raises:
        UsageError: a value is wrong.
        SystemExit: argparse has printed help (0) or refused the flags (2).
    """
    model = imported(command.settings)
    text = f"{command.help[0].upper()}{command.help[1:]}."
    parser = FlagParser(f"kvrouter {command.name}", text)
    add_flags(parser, model)
    given = vars(parser.parse_args(args))
    return load(model, given, given.pop("config"), _variables)


def _variables() -> set[str]:
    """Variables of the environment that the commands read."""
    models = (imported(command.settings) for command in COMMANDS)
    return {option.env for model in models for option in options(model)}


def complain(sentence: str) -> int:
    """Say what the user must change; returns the exit code for wrong use."""
    print(sentence, file=sys.stderr)
    return 2
