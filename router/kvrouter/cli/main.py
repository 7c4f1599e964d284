"""The `kvrouter` command: finds the command and hands over to `kvrouter.cli.run_command`.

Imports nothing heavy, so that `kvrouter --help` is quick.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Command:
    """One command: where its settings model and its `run(settings) -> int | None` are.

    One that `rereads` its settings while it runs gets a function that loads them as second
    argument.
    """

    name: str
    help: str
    settings: str
    run: str
    rereads: bool = False

    def leads(self, args: Sequence[str]) -> bool:
        """Whether `args` begin with its name, which may be of several words."""
        return " ".join(args[: len(self.name.split())]) == self.name


COMMANDS: Final = (
    Command(
        "serve",
        "run the router before pools of prefill and decode engines",
        "kvrouter.app.settings:RouterSettings",
        "kvrouter.app.process:run",
        rereads=True,
    ),
    Command(
        "store",
        "run a node of the KV store",
        "kvrouter_store.node.settings:StoreSettings",
        "kvrouter_store.node.process:run",
    ),
    Command(
        "sim",
        "run a simulated engine that moves and checks real KV bytes, without a GPU",
        "kvrouter.tools.sim.settings:SimSettings",
        "kvrouter.tools.sim.serve:run",
    ),
    Command(
        "doctor",
        "examine engines, store and this host, and say what to do about what is wrong",
        "kvrouter.tools.doctor.settings:DoctorSettings",
        "kvrouter.tools.doctor.run:run",
    ),
    Command(
        "status",
        "show what a router knows at this moment, each second, or once for a script",
        "kvrouter.tools.terminal.settings:StatusSettings",
        "kvrouter.tools.terminal.run:run",
    ),
    Command(
        "register",
        "keep engines registered in Redis, where routers find them, while they are healthy",
        "kvrouter.membership.discovery.register_settings:RegisterSettings",
        "kvrouter.membership.discovery.register:run",
    ),
    Command(
        "demo",
        "run store, engines and router on this machine, send them requests, kill one",
        "kvrouter.tools.demo.settings:DemoSettings",
        "kvrouter.tools.demo.run:run",
    ),
    Command(
        "bench serve",
        "load an OpenAI endpoint and print the figures of `vllm bench serve`",
        "kvrouter.tools.bench.settings:BenchSettings",
        "kvrouter.tools.bench.run:run",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvrouter`; returns the exit code: 0 well, 1 failed while running, 2 wrong use."""
    args = list(sys.argv[1:] if argv is None else argv)
    command = next((c for c in COMMANDS if c.leads(args)), None)
    if command is not None:
        rest = args[len(command.name.split()) :]
        code: int = imported("kvrouter.cli.run_command:run_command")(command, rest)
        return code
    if args and args[0] == "config":
        code = imported("kvrouter.cli.config_command:run_config")(COMMANDS, args[1:])
        return code
    if args and args[0] == "key":
        code = imported("kvrouter.access.key_command:run_key")(args[1:])
        return code
    _top_parser().parse_args(args)
    return 2


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrouter", description=f"{metadata.metadata('kvrouter')['Summary']}."
    )
    parser.add_argument(
        "--version", action="version", version=f"kvrouter {metadata.version('kvrouter')}"
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for each in COMMANDS:
        subparsers.add_parser(each.name, help=each.help)
    subparsers.add_parser("key", help="make a key for a caller of the router")
    subparsers.add_parser("config", help="show, check and describe the settings of these commands")
    return parser


def imported(path: str) -> Any:
    """What `MODULE:NAME` names, imported now."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
