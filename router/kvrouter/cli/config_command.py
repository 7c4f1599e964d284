"""`kvrouter config`: shows, checks and describes the settings of the other commands."""

from __future__ import annotations

import json
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, BeforeValidator, ByteSize
from pydantic.json_schema import GenerateJsonSchema

from kvrouter.cli.main import COMMANDS, Command, find_command, imported
from kvrouter.cli.run_command import complain, load_settings
from kvrouter.options.complaints import UsageError
from kvrouter.options.option import options
from kvrouter.tools.docs.configuration import configuration_page

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_SERVE: Final = COMMANDS[0]
_USAGES: Final = {
    "show": "kvrouter config show COMMAND [FLAG ...]",
    "check": "kvrouter config check FILE [COMMAND] [FLAG ...]",
    "schema": "kvrouter config schema [COMMAND]",
    "docs": "kvrouter config docs",
}


def json_schema(command: str, model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of the files that `kvrouter COMMAND --config FILE` takes.

    A value that passes may still be refused for its meaning (a wrong address, two settings that
    exclude each other); `kvrouter config check` finds that too.
    """
    own = model.model_json_schema(schema_generator=_Generator)
    properties: dict[str, Any] = {}
    for option in options(model):
        member = _member(
            own["properties"][option.name], model.model_fields[option.name], option.default
        )
        properties[option.name] = {"description": option.help, **member}
        dashed = option.name.replace("_", "-")
        if dashed != option.name:
            properties[dashed] = {"$ref": f"#/properties/{option.name}"}
    definitions = {"$defs": own["$defs"]} if "$defs" in own else {}
    return {
        "$schema": DIALECT,
        "title": f"Settings of kvrouter {command}",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **definitions,
    }


class _Generator(GenerateJsonSchema):
    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        """Our own types are read from text."""
        return {"type": "string"}


def _member(schema: dict[str, Any], info: FieldInfo, text: str) -> dict[str, Any]:
    """The schema of one setting; `text` is its default in help."""
    rest = {key: value for key, value in schema.items() if key not in _NOT_OF_FILES}
    default = rest.pop("default", None)
    kind = info.annotation
    if rest.get("type") == "string" and isinstance(default, int | float):
        default = text  # a type of our own: 100ms, 0600
        if isinstance(kind, type) and issubclass(kind, float):
            rest["type"] = ["string", "number"]
    if _read_from_text(info) and rest.get("type") != "string":
        rest = {"anyOf": [rest, {"type": "string"}]}
    infinite = isinstance(default, float) and not isfinite(default)
    return rest if default is None or infinite else {**rest, "default": default}


_NOT_OF_FILES: Final = frozenset(
    {"title", "description", "flags", "section", "metavar", "positional"}
)


def _read_from_text(info: FieldInfo) -> bool:
    """Whether a value may also be a text: `8GiB`, `a,b`, `100ms`."""
    if any(isinstance(each, BeforeValidator) for each in info.metadata):
        return True
    kind = info.annotation
    return kind is ByteSize or getattr(kind, "__origin__", None) is list


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
