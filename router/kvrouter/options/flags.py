"""Command-line flags from settings models: one description makes flag, help, env, YAML and docs.

Works on any pydantic-settings model; it knows none by name.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import BaseModel, ByteSize, ValidationError
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings.exceptions import SettingsError as SourceError

from kvrouter.options.service_links import advice, service_links
from kvrouter.options.yaml_file import UnreadableFile, did_you_mean, read_settings_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from pydantic.fields import FieldInfo

S = TypeVar("S", bound=BaseSettings)


_ENVIRONMENT_READ: Final[Mapping[str, Any]] = {"_env_prefix": "\0"}
"""Has a model read no variable by itself: none has that prefix."""
_MISSPELT: Final = 0.85
"""Likeness from which on a variable that nobody reads is taken for a setting's own."""


_SHOWN: Final = 400
"""Characters of a value, and of what is wrong with it, that a message repeats at most."""


class UsageError(Exception):
    """What the user must change; the command ends with exit code 2.

    Attributes:
        sentences: all that is wrong; the first is what `str` gives.
    """

    def __init__(self, *sentences: str) -> None:
        super().__init__(sentences[0])
        self.sentences = sentences


class FlagParser(argparse.ArgumentParser):
    """Refuses abbreviations, and names the flag that an unknown one resembles."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print usage and `message` on stderr and leave with exit code 2."""
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if message.startswith("unrecognized") and unknown[0].startswith("--"):
            message += did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
        super().error(message)


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
        positional: whether it may also be given without its flag.
        secret: whether messages must not repeat its value.
    """

    name: str
    flags: tuple[str, ...]
    env: str
    default: str
    help: str
    kind: str
    choices: tuple[str, ...]
    metavar: str
    positional: bool = False
    secret: bool = False


def options(model: type[BaseSettings]) -> Iterator[Option]:
    """Every setting of `model`: its own in their order, then those of the groups it is made of."""
    prefix = model.model_config.get("env_prefix", "")
    own = model.__annotations__
    for name, info in sorted(model.model_fields.items(), key=lambda item: item[0] not in own):
        kind, choices, metavar = _kind(info.annotation)
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        aliases = extra.get("flags", [])
        flags = ("--" + name.replace("_", "-"), *(str(f) for f in _items(aliases)))
        default, text = _default(info), _as_sentence(info.description or "")
        env, bare = f"{prefix}{name}".upper(), bool(extra.get("positional"))
        secret = "SecretStr" in str(info.annotation)
        yield Option(name, flags, env, default, text, kind, choices, metavar, bare, secret)


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
        if option.positional:
            parser.add_argument(
                option.name,
                nargs="?",
                default=argparse.SUPPRESS,
                metavar=option.name.upper(),
                help=f"The same as {option.flags[0]}.",
            )


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """Settings that passed validation, and whence each that was given came.

    Attributes:
        settings: the values.
        whence: by name, of those that were given.
        advice: sentences about what was ignored.
    """

    settings: S
    whence: Mapping[str, str]
    advice: tuple[str, ...] = ()


def load(
    model: type[S],
    flags: Mapping[str, Any],
    config: str | None = None,
    elsewhere: Callable[[], Collection[str]] = tuple,
) -> Loaded[S]:
    """Merge flags over the environment over the YAML file over defaults, and validate.

    Args:
        model: what to load.
        flags: values by field name, of the flags that were given.
        config: path of the YAML file, if any.
        elsewhere: variables of the environment that others read, asked where one looks misspelt.

    Raises:
        UsageError: values are wrong, or the file is.
    """
    known = {option.name: option for option in options(model)}
    values: dict[str, Any] = {}
    whence: dict[str, str] = {}
    problems: list[str] = []
    if config is not None:
        try:
            file = read_settings_file(config, known)
        except UnreadableFile as error:
            raise UsageError(f"--config {error}") from None
        problems += (f"--config {problem}" for problem in file.problems)
        values.update(file.values)
        whence.update({name: f"file {place}" for name, place in file.places.items()})
    found, misspelt, ignored = _read_env(model, known, elsewhere)
    problems += misspelt
    for name, value in found.items():
        values[name], whence[name] = value, f"environment {known[name].env}"
    values.update(flags)
    whence.update(dict.fromkeys(flags, "flag"))
    try:
        settings = model(**values, **_ENVIRONMENT_READ)
    except ValidationError as error:
        problems += _sentences(error, known, whence)
    if problems:
        raise UsageError(*problems)
    return Loaded(settings, whence, (advice(ignored),) if ignored else ())


def _read_env(
    model: type[BaseSettings],
    known: Mapping[str, Option],
    elsewhere: Callable[[], Collection[str]],
) -> tuple[dict[str, Any], list[str], list[str]]:
    """What the environment sets, which variables seem to be misspelt, and which are ignored."""
    prefix = str(model.model_config.get("env_prefix", ""))
    source = EnvSettingsSource(model)
    links = service_links(source.env_vars, prefix)
    source.env_vars = {k: v for k, v in source.env_vars.items() if k not in links}
    try:
        values = source()
    except SourceError as error:
        raise UsageError(f"environment: {error}") from None
    names = [name.upper() for name in known]
    problems = []
    for variable in sorted(name.upper() for name in source.env_vars):
        name = variable.removeprefix(prefix)
        near = get_close_matches(name, names, 1, _MISSPELT)
        if not near or name in (variable, near[0]) or variable in elsewhere():
            continue
        problems.append(f"environment: no setting {variable}; did you mean {prefix}{near[0]}?")
    return values, problems, links


def _sentences(
    error: ValidationError, known: Mapping[str, Option], whence: Mapping[str, str]
) -> list[str]:
    return [_sentence(each, known, whence) for each in error.errors(include_url=False)]


def _sentence(error: Any, known: Mapping[str, Option], whence: Mapping[str, str]) -> str:
    cause = error.get("ctx", {}).get("error")
    message = str(cause) if cause is not None else error["msg"].removeprefix("Input ")
    option = known.get(str(error["loc"][0])) if error["loc"] else None
    if option is None:
        return message
    if error["type"] == "missing":  # its input is all other values, secrets too
        return f"{option.flags[0]}: a value is needed"
    origin = whence.get(option.name, "")
    where = option.flags[0] if origin in ("flag", "") else f"{option.name} ({origin})"
    shown = "" if cause is not None or option.secret else f" {_cut(repr(error['input']))}"
    return f"{where}{shown}: {_cut(message)}"


def _cut(text: str) -> str:
    """`text`, or its beginning where nobody would read it."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


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
