"""A setting as users spell it: flag, variable and default, from a field of a pydantic model.

A field `some_name` is the flag `--some-name`, the variable `PREFIX_SOME_NAME` (the model's
`env_prefix`) and the YAML key `some_name`. Its `json_schema_extra` may say more:

- `section`: the heading under which help lists it and the fields after it;
- `metavar`: what help calls its value, unless its name or type says that;
- `flags`: more spellings of the flag (a time `some_s` is `--some`, and `--some-s`);
- `positional`: it may also be given without its flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic_core import PydanticUndefined

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

REQUIRED: Final = "Required"  # the section of settings without a default, which comes first
Kind = Literal["list", "switch", "choice", "value"]

_BY_NAME: Final = (
    ("_s", "SECONDS"),
    ("timeout", "SECONDS"),
    ("file", "FILE"),
    ("port", "PORT"),
    ("ports", "PORT"),
    ("host", "HOST"),
    ("hosts", "HOST"),
    ("url", "URL"),
    ("model", "NAME"),
    ("token", "TOKEN"),
    ("key", "KEY"),
    ("seed", "SEED"),
)
"""What help calls a value, by the end of its setting's name."""
_BY_TYPE: Final = {ByteSize: "BYTES", Path: "FILE", int: "COUNT", float: "NUMBER"}


@dataclass(frozen=True, slots=True)
class Option:
    """One setting."""

    name: str  # field of the model and key of the YAML file
    flags: tuple[str, ...]  # spellings on the command line, the preferred one first
    env: str  # its environment variable
    default: str  # as a user would type it; "" if there is none
    help: str  # what it does
    section: str  # the heading under which help lists it
    kind: Kind  # what values it takes
    choices: tuple[str, ...]  # the values of a "choice"
    metavar: str  # what help calls its value
    positional: bool = False  # whether it may also be given without its flag
    secret: bool = False  # whether messages must not repeat its value

    @property
    def shown(self) -> tuple[str, ...]:
        """The spellings that help and pages name: of a time the preferred one alone."""
        return self.flags[:1] if self.name.endswith("_s") else self.flags


def options(model: type[BaseModel]) -> Iterator[Option]:
    """Every setting of `model`: its own in their order, then those of the groups it inherits."""
    section = ""
    for name in _names(model):
        info = model.model_fields[name]
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        section = str(extra.get("section", section))
        kind, choices = _kind(info)
        yield Option(
            name,
            tuple(dict.fromkeys([*_spellings(name), *_texts(extra.get("flags", []))])),
            env_prefix(model) + name.upper(),
            _default(info),
            info.description or "",
            REQUIRED if info.is_required() else section,
            kind,
            choices,
            str(extra.get("metavar", _metavar(name, info))),
            positional=bool(extra.get("positional")),
            secret="SecretStr" in str(info.annotation),
        )


def env_prefix(model: type[BaseModel]) -> str:
    """What the variables of a model's settings begin with."""
    return str(model.model_config.get("env_prefix", ""))


def flag_of(name: str) -> str:
    """The flag of a field, as help and messages spell it: that of a time without its unit."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def _spellings(name: str) -> Iterator[str]:
    yield flag_of(name)
    yield "--" + name.replace("_", "-")


def _names(model: type[BaseModel]) -> Iterator[str]:
    """Its fields: its own first, then those of its bases from left to right."""
    seen = set()
    for each in model.__mro__:
        for name in vars(each).get("__annotations__", ()):
            if name in model.model_fields and name not in seen:
                seen.add(name)
                yield name


def _type(info: FieldInfo) -> Any:
    """The type of a field, without its None."""
    annotation = info.annotation
    if get_origin(annotation) in (Union, UnionType):
        return next(each for each in get_args(annotation) if each is not type(None))
    return annotation


def _kind(info: FieldInfo) -> tuple[Kind, tuple[str, ...]]:
    annotation = _type(info)
    if list in (annotation, get_origin(annotation)):
        return "list", ()
    if get_origin(annotation) is Literal:
        return "choice", tuple(str(each) for each in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "choice", tuple(str(member.value) for member in annotation)
    return ("switch" if annotation is bool else "value"), ()


def _metavar(name: str, info: FieldInfo) -> str:
    annotation = _type(info)
    own = getattr(annotation, "metavar", None)
    if own is not None:
        return str(own)
    if any(getattr(each, "le", None) == 1 for each in info.metadata):
        return "RATIO"
    for end, metavar in _BY_NAME:
        if name.endswith(end):
            return metavar
    return _BY_TYPE.get(annotation, "TEXT")


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    if default in (None, PydanticUndefined) or isinstance(default, BaseModel):
        return ""
    return _typed(default)


def _typed(value: Any) -> str:
    """A value as a user would type it."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, ByteSize):
        return value.human_readable().replace(".0", "")
    if isinstance(value, list):
        return ",".join(map(_typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _texts(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]
