"""Runs one command: reads its flags, loads its settings, and reports errors in a sentence."""

from __future__ import annotations

import sys
from errno import EADDRINUSE, EADDRNOTAVAIL
from socket import EAI_NONAME
from typing import Any, Final

from kvrouter.cli.main import COMMANDS, Command, imported
from kvrouter.options.complaints import UsageError
from kvrouter.options.flags import FlagParser
from kvrouter.options.load import Loaded, load
from kvrouter.options.option import options

_REMEDIES: Final = {
    EADDRINUSE: "give another port",
    EADDRNOTAVAIL: "give an address of this host",
    EAI_NONAME: "give an address of this host",
}


def run_command(command: Command, args: list[str]) -> int:
    """Load the settings of `command` and run it until it ends; returns the exit code."""
    prog = f"kvrouter {command.name}"
    try:
        loaded = load_settings(command, args)
        for sentence in loaded.advice:
            complain(f"{prog}: {sentence}")
        reread = lambda: load_settings(command, args).settings  # noqa: E731
        more = (reread,) if command.rereads else ()
        code: int | None = imported(command.run)(loaded.settings, *more)
    except UsageError as error:
        return complain(f"{prog}: {error} (see {prog} --help)")
    except OSError as error:
        complain(f"{prog}: {_sentence(error)}")
        return 1
    except KeyboardInterrupt:
        return 130
    return code or 0


def load_settings(command: Command, args: list[str]) -> Loaded[Any]:
    """The validated settings of `command` for these flags.

    Raises:
        UsageError: a flag or a value is wrong.
        SystemExit: help was printed.
    """
    model = imported(command.settings)
    about = f"{command.help[0].upper()}{command.help[1:]}."
    parser = FlagParser(f"kvrouter {command.name}", command.usage, about, model)
    given = parser.read(args)
    return load(model, given, given.pop("config"), _variables)


def complain(sentence: str) -> int:
    """Print `sentence` on stderr; returns the exit code for wrong use."""
    sys.stderr.write(f"{sentence}\n")  # at once: the log is written by another thread
    return 2


def _variables() -> set[str]:
    """The environment's variables that any command reads."""
    return {option.env for command in COMMANDS for option in options(imported(command.settings))}


def _sentence(error: OSError) -> str:
    text = error.strerror or str(error)
    named = f"{error.filename}: {text}" if error.filename else text
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{named}; {remedy}" if remedy else named
