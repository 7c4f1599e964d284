"""The `kvrouter` command: finds the command that is meant and runs it.

Imports nothing heavy, so that `kvrouter --help` is quick.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Final

from kvrouter import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    name: str  # of one or two words
    help: str  # what it does
    usage: str  # its usual arguments
    settings: str  # `MODULE:CLASS` of its settings
    run: str  # `MODULE:FUNCTION` that takes the settings and returns the exit code, or None for 0
    rereads: bool = False  # whether `run` also takes a function that loads the settings again


COMMANDS: Final = (
    Command(
        "serve",
        "run the router in front of prefill and decode engines",
        "[--prefill URL ...] --decode URL ... [FLAG ...]",
        "kvrouter.app.settings:RouterSettings",
        "kvrouter.app.process:run",
        rereads=True,
    ),
    Command(
        "store",
        "run a node of the KV store",
        "[--memory BYTES] [FLAG ...]",
        "kvrouter_store.node.settings:StoreSettings",
        "kvrouter.app.store_node:run",
    ),
    Command(
        "sim",
        "run a simulated engine that moves and checks real KV bytes, without a GPU",
        "--model NAME [FLAG ...]",
        "kvrouter.tools.sim.settings:SimSettings",
        "kvrouter.tools.sim.serve:run",
    ),
    Command(
        "doctor",
        "check the engines, the store and this host, and say how to mend each fault",
        "[FLAG of kvrouter serve ...] [--json] [--strict]",
        "kvrouter.tools.doctor.run:DoctorSettings",
        "kvrouter.tools.doctor.run:run",
    ),
    Command(
        "status",
        "ask a running router once, and print a table of its engines",
        "[URL] [FLAG ...]",
        "kvrouter.tools.status:StatusSettings",
        "kvrouter.tools.status:run",
    ),
    Command(
        "why",
        "tell what became of prompt tokens lately: found where, or computed for which reason",
        "[REQUEST-ID] [FLAG ...]",
        "kvrouter.tools.why:WhySettings",
        "kvrouter.tools.why:run",
    ),
    Command(
        "register",
        "keep healthy engines registered in Redis, where routers find them",
        "--redis URL --decode URL ... [FLAG ...]",
        "kvrouter.membership.discovery.register:RegisterSettings",
        "kvrouter.membership.discovery.register:run",
    ),
    Command(
        "demo",
        "run a store, engines and a router on this machine, send requests, kill an engine",
        "[FLAG ...]",
        "kvrouter.tools.demo.settings:DemoSettings",
        "kvrouter.tools.demo.run:run",
    ),
    Command(
        "key new",
        "make an API key for a caller of the router",
        "NAME [--file FILE]",
        "kvrouter.access.key_command:KeySettings",
        "kvrouter.access.key_command:run",
    ),
)
CONFIG: Final = {
    "config show": "print the settings in effect for a command with its flags, and their origins",
    "config check": "print all that is wrong with a YAML file of settings",
    "config schema": "print the JSON schema of such files",
    "config docs": "print docs/configuration.md",
}
"""What `kvrouter config` does; `kvrouter.cli.config_command` has the functions."""
REMOVED: Final = {
    "bench": "; docs/bench.md names tools that measure a router",
    "record": "; give kvrouter serve --record PATH",
}
"""What to do instead of commands that earlier versions had, or that are flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvrouter`; returns the exit code: 0 success, 1 failure at run time, 2 wrong use."""
    args = list(sys.argv[1:] if argv is None else argv)
    command = find_command(args)
    code: int
    if command is not None:
        rest = args[len(command.name.split()) :]
        code = imported("kvrouter.cli.run_command:run_command")(command, rest)
    elif " ".join(args[:2]) in CONFIG:
        code = imported("kvrouter.cli.config_command:run_config")(args[1], args[2:])
    else:
        code = _overview(args)
    return code


def find_command(args: Sequence[str]) -> Command | None:
    """The command that `args` begin with."""
    return next((c for c in COMMANDS if args[: len(c.name.split())] == c.name.split()), None)


def imported(path: str) -> Any:
    """What `MODULE:NAME` names, imported now."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _overview(args: list[str]) -> int:
    """List the commands, or those of a group; say what is wrong with any other command."""
    known = {command.name: command.help for command in COMMANDS} | CONFIG
    first, second = [*args, "", ""][:2]
    group = {name: text for name, text in known.items() if name.startswith(f"{first} ")}
    if first == "--version":
        print(f"kvrouter {__version__}")
        return 0
    if first in ("", "-h", "--help"):
        print(_listing("kvrouter", f"{metadata.metadata('kvrouter')['Summary']}.", known))
        return 0 if first else 2
    if group and second in ("", "-h", "--help"):
        print(_listing(f"kvrouter {first}", "", group))
        return 0 if second else 2
    meant = f"{first} {second}" if group else first
    near = get_close_matches(meant, [*known, *(name.split()[0] for name in known)], 1)
    hint = REMOVED.get(first) or (f"; did you mean {near[0]}?" if near else "")
    prog = f"kvrouter {first}" if group else "kvrouter"
    print(f"kvrouter: there is no command {meant}{hint} (see {prog} --help)", file=sys.stderr)
    return 2


def _listing(prog: str, about: str, commands: dict[str, str]) -> str:
    width = max(map(len, commands))
    lines = [f"usage: {prog} COMMAND [FLAG ...]", *(["", about] if about else []), "", "Commands:"]
    lines += (f"  {name:{width}}  {text}" for name, text in commands.items())
    lines += ["", "kvrouter COMMAND --help lists the flags of a command."]
    if prog == "kvrouter":
        lines.append("kvrouter --version prints the version.")
    return "\n".join(lines)
