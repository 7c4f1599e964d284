"""Runs one command: reads its flags, or prints its help; loads its settings; reports errors."""

from __future__ import annotations

import argparse
import sys
from errno import EADDRINUSE, EADDRNOTAVAIL
from functools import partial
from socket import EAI_NONAME
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from kvrouter.cli.main import COMMANDS, Command, imported
from kvrouter.options.complaints import UsageError, did_you_mean
from kvrouter.options.load import Loaded, load
from kvrouter.options.option import REQUIRED, Option, options
from kvrouter.options.other_routers import instead_of_flag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic import BaseModel

_REMEDIES: Final = {
    EADDRINUSE: "give another port",
    EADDRNOTAVAIL: "give an address of this host",
    EAI_NONAME: "give an address of this host",
}
_OTHERS: Final = "General"
_SHOWN: Final = 80


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

    UsageError: a flag or a value is wrong. SystemExit: help was printed.
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


class FlagParser(argparse.ArgumentParser):
    """One flag per setting of a model, and `--config`.

    Flags cannot be shortened: a new flag would otherwise change what a script means.
    """

    def __init__(self, prog: str, usage: str, description: str, model: type[BaseModel]) -> None:
        settings = list(options(model))
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=description,
            epilog=_epilog(settings),
            formatter_class=partial(_Help, {each.name: each.shown for each in settings}),
            allow_abbrev=False,
            exit_on_error=False,
            add_help=False,
        )
        self._removed: Mapping[str, str] = getattr(model, "removed", {})
        self._metavars: dict[str, str] = {}
        sections: dict[str, list[Option]] = {REQUIRED: []}
        for option in settings:
            sections.setdefault(option.section or _OTHERS, []).append(option)
        for title, members in sections.items():
            group = self.add_argument_group(title)
            for option in members:
                self._add(group, option)
        group = self.add_argument_group(_OTHERS)
        group.add_argument("--config", metavar="FILE", help="YAML file of settings by their names.")
        group.add_argument("-h", "--help", action="help", help="Show this text.")
        self._metavars |= {"--config": "FILE", "--help": ""}

    def read(self, args: Sequence[str]) -> dict[str, Any]:
        """The values of the flags that were given, by the setting's name, and `config`.

        UsageError: a flag is unknown, or lacks its value. SystemExit: help was printed.
        """
        try:
            given, unknown = self.parse_known_args(args)
        except argparse.ArgumentError as error:
            raise UsageError(self._misused(str(error.argument_name))) from None
        if unknown:
            raise UsageError("\n".join(self._unknown(unknown)))  # each at once: there may be many
        return vars(given)

    def _add(self, group: argparse._ArgumentGroup, option: Option) -> None:
        text = option.help + (f" Default: {option.default}." if option.default else "")
        common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
        common["help"] = text.replace("%", "%%")
        if option.kind == "switch":
            self._metavars |= dict.fromkeys(option.flags, "")
            group.add_argument(*option.flags, action=argparse.BooleanOptionalAction, **common)
            return
        metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.metavar
        self._metavars |= dict.fromkeys(option.flags, metavar)
        if option.kind == "list":
            common |= {"action": "extend", "nargs": "+"}
        if all(choice.islower() for choice in option.choices) and option.choices:
            common["type"] = str.lower
        group.add_argument(*option.flags, metavar=metavar, **common)
        if option.positional:
            common["help"] = f"The same as {option.flags[0]}."
            del common["dest"]
            group.add_argument(option.name, nargs="?", metavar=metavar, **common)

    def _misused(self, flags: str) -> str:
        """What to do about a flag with too few values, or one too many."""
        flag = flags.rpartition("/")[2] if flags == "-h/--help" else flags.partition("/")[0]
        metavar = self._metavars.get(flag, "")
        if metavar:
            return f"{flag} lacks its value; write {flag} {metavar}"
        return f"{flag} takes no value; write it alone"

    def _unknown(self, given: list[str]) -> Iterator[str]:
        """A sentence for each unknown flag, or for the first word if there is none."""
        if not any(map(_is_flag, given)):
            yield f"{given[0][:_SHOWN]!r} belongs to no flag; leave it out or name its flag"
        for word, following in zip(given, [*given[1:], ""], strict=True):
            if _is_flag(word):
                flag, equals, value = word.partition("=")
                value = value if equals or _is_flag(following) else following
                told = self._removed.get(flag) or instead_of_flag(flag, value, self._metavars)
                remedy = f"; {told}" if told else did_you_mean(flag, self._metavars)
                yield f"there is no flag {flag[:_SHOWN]}{remedy}"


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


class _Help(argparse.HelpFormatter):
    """Names the value of a flag once, and breaks no line within a word such as `at-once`.

    `shown` has the spellings of each setting's flag that it names, by the setting's name.
    """

    def __init__(self, shown: Mapping[str, Sequence[str]], prog: str) -> None:
        super().__init__(prog)
        self._flags = shown

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        flags = self._flags.get(action.dest, action.option_strings)
        return f"{', '.join(flags)} {self._format_args(action, '')}"


def _epilog(settings: Sequence[Option]) -> str:
    one = next((option for option in settings if "_" in option.name), settings[0])
    return (
        f"Each setting may also be given in the environment ({one.env} for {one.flags[0]}) or by "
        f"its name ({one.name}) in the YAML file of --config. A flag wins over the environment, "
        "and the environment wins over the file."
    )
