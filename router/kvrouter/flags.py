"""Command-line flags from settings models: one description makes flag, help, env, YAML and docs.

Works on any pydantic-settings model; it knows none by name.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ByteSize, ValidationError
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings.exceptions import SettingsError as SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

S = TypeVar("S", bound=BaseSettings)


class UsageError(Exception):
    """What the user must change, in one sentence; the command ends with exit code 2."""


@dataclass(frozen=True, slots=True)
class Option:
    """One setting as users spell it.

    Attributes:
        name: field of the model and key of the YAML file.
        flags: spellings on the command line, the first one preferred.
        env: name of its environment variable.
        default: as shown in help and documentation; "" where there is none.
        help: its description.
        kind: "list", "switch", "choice" or "value".
        choices: what a "choice" may be.
        metavar: what help calls its value.
    """

    name: str
    flags: tuple[str, ...]
    env: str
    default: str
    help: str
    kind: str
    choices: tuple[str, ...]
    metavar: str


def options(model: type[BaseSettings]) -> Iterator[Option]:
    """Every setting of `model`, in the order of its fields."""
    prefix = model.model_config.get("env_prefix", "")
    for name, info in model.model_fields.items():
        kind, choices, metavar = _kind(info.annotation)
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        aliases = extra.get("flags", [])
        flags = ("--" + name.replace("_", "-"), *(str(f) for f in _items(aliases)))
        default, text = _default(info), _as_sentence(info.description or "")
        yield Option(name, flags, f"{prefix}{name}".upper(), default, text, kind, choices, metavar)


def add_flags(parser: argparse.ArgumentParser, model: type[BaseSettings]) -> None:
    """Add one flag per setting to `parser`, and `--config`; absent flags stay absent."""
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="YAML file of settings, by their names."
    )
    for option in options(model):
        text = option.help + (f" Default: {option.default}." if option.default else "")
        common: dict[str, Any] = {
            "dest": option.name,
            "default": argparse.SUPPRESS,
            "help": text.replace("%", "%%"),
        }
        if option.kind == "switch":
            parser.add_argument(*option.flags, action=argparse.BooleanOptionalAction, **common)
            continue
        if option.kind == "list":
            common.update(action="extend", nargs="+")
        if option.kind == "choice":
            common.update(choices=option.choices)
            if all(choice.islower() for choice in option.choices):
                common.update(type=str.lower)
        else:
            common.update(metavar=option.metavar)
        parser.add_argument(*option.flags, **common)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """Settings that passed validation, and whence each that was given came."""

    settings: S
    whence: Mapping[str, str]


def load(model: type[S], flags: Mapping[str, Any], config: str | None = None) -> Loaded[S]:
    """Merge flags over the environment over the YAML file over defaults, and validate.

    Args:
        model: what to load.
        flags: values by field name, of the flags that were given.
        config: path of the YAML file, if any.

    Raises:
        UsageError: a value is wrong, or the file is.
    """
    known = {option.name: option for option in options(model)}
    values: dict[str, Any] = {}
    whence: dict[str, str] = {}
    for origin, found in (
        (f"file {config}", _read_yaml(config, known) if config else {}),
        ("environment", _read_env(model)),
        ("flag", dict(flags)),
    ):
        for name, value in found.items():
            values[name] = value
            whence[name] = f"{origin} {known[name].env}" if origin == "environment" else origin
    try:
        return Loaded(model(**values), whence)
    except ValidationError as error:
        raise UsageError(_sentence(error, known, whence)) from None


def _read_env(model: type[BaseSettings]) -> dict[str, Any]:
    try:
        return EnvSettingsSource(model)()
    except SourceError as error:
        raise UsageError(f"environment: {error}") from None


def _read_yaml(path: str, known: Mapping[str, Option]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; give a readable file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise UsageError(f"--config {path}: not YAML ({line}); write `name: value` lines") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: not a mapping; write `name: value` lines")
    named = {str(key).replace("-", "_"): value for key, value in content.items()}
    for name in named:
        if name not in known:
            raise UsageError(f"--config {path}: no setting {name!r}; there are {', '.join(known)}")
    return named


def _sentence(
    error: ValidationError, known: Mapping[str, Option], whence: Mapping[str, str]
) -> str:
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    message = str(cause) if cause is not None else first["msg"].removeprefix("Input ")
    option = known.get(str(first["loc"][0])) if first["loc"] else None
    if option is None:
        return message
    origin = whence.get(option.name, "")
    where = option.flags[0] if origin in ("flag", "") else f"{option.name} ({origin})"
    return f"{where}: {message}" if cause is not None else f"{where} {first['input']!r}: {message}"


def _kind(annotation: Any) -> tuple[str, tuple[str, ...], str]:
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is list or annotation is list:
        return "list", (), "VALUE"
    if get_origin(annotation) is Literal:
        return "choice", tuple(str(a) for a in get_args(annotation)), ""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "choice", tuple(str(member.value) for member in annotation), ""
    if annotation is bool:
        return "switch", (), ""
    names = {int: "N", float: "SECONDS", Path: "PATH"}
    return "value", (), names.get(annotation, "VALUE")


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    if default in (None, PydanticUndefined, "", []) or isinstance(default, BaseModel):
        return ""
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, ByteSize):
        return default.human_readable().replace(".0", "")
    if isinstance(default, list):
        return " ".join(str(item) for item in default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _as_sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
