"""Merges flags, environment and YAML file over the defaults, and validates the result.

`read_settings_file` reads values with their lines, and wrong names; it knows no setting by name,
and validates no value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource

from kvrouter.options.bounded_yaml import TooMuch, bounded_root
from kvrouter.options.complaints import UsageError, complaints, did_you_mean
from kvrouter.options.option import env_prefix, options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

MAX_BYTES: Final = 1 << 20
S = TypeVar("S", bound=BaseSettings)

_SHOWN: Final = 80
_MISSPELT: Final = 0.85
"""Similarity from which on a variable that no command reads counts as a misspelt setting."""


_URL: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d{1,5}")
_URL_NAME: Final = re.compile(r"\w+_PORT(_\d{1,5}_(TCP|UDP|SCTP))?")
_PART_NAME: Final = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d{1,5}_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR))"
)


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The contents of a file."""

    values: Mapping[str, Any]  # by the setting's name
    places: Mapping[str, str]  # `FILE:LINE` of each
    problems: tuple[str, ...]  # sentences about wrong names


class UnreadableFile(Exception):
    """The file cannot be read, or is no mapping; a sentence with the remedy."""


def read_settings_file(path: str, known: Collection[str]) -> SettingsFile:
    """Read `path`, in which names may have dashes or underscores.

    A name that is not in `known`, or occurs twice, is a problem and has no value.

    UnreadableFile: see there.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    problems = []
    for written, line, value in _members(path):
        name, place = written.replace("-", "_"), f"{path}:{line}"
        if name not in known:
            problems.append(f"{place}: no setting {written[:_SHOWN]!r}{did_you_mean(name, known)}")
        elif name in values:
            before = places[name].rpartition(":")[2]
            problems.append(f"{place}: {written!r} is already on line {before}; give it once")
        else:
            values[name], places[name] = value, place
    return SettingsFile(values, places, tuple(problems))


def _text(path: str) -> str:
    with Path(path).open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise TooMuch(f"more than {MAX_BYTES >> 20} MiB")
    return content.decode("utf-8")


def _members(path: str) -> list[tuple[str, int, Any]]:
    """Name, line (from 1) and value of each member of the mapping that the file is."""
    try:
        loader = yaml.SafeLoader(_text(path))
        node = bounded_root(loader)
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise UnreadableFile(f"{path}: not a mapping; write `name: value` lines")
        loader.flatten_mapping(node)
        return [
            (str(key.value), key.start_mark.line + 1, loader.construct_object(value, deep=True))
            for key, value in node.value
        ]
    except OSError as error:
        raise UnreadableFile(f"{path}: {error.strerror}; give a readable file") from None
    except TooMuch as error:
        raise UnreadableFile(f"{path}: {error}; give a smaller file") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML raises of these kinds for values that do not fit their tags.
        mark = getattr(error, "problem_mark", None)  # its text may be a secret
        line = f" (line {mark.line + 1})" if mark is not None else ""
        raise UnreadableFile(f"{path}: not YAML{line}; write `name: value` lines") from None


def read_environment(
    model: type[BaseSettings],
) -> tuple[Mapping[str, Any], Collection[str], tuple[str, ...]]:
    """Values by the setting's name, all variables with the prefix of `model`, and advice."""
    source = EnvSettingsSource(model)
    prefix = source.env_prefix.lower()
    ours = {name: value for name, value in source.env_vars.items() if name.startswith(prefix)}
    links = sorted(name for name, value in ours.items() if _is_service_link(name, value or ""))
    source.env_vars = {name: ours[name] for name in ours.keys() - set(links)}
    return source(), [name.upper() for name in source.env_vars], _advice(links)


def _advice(links: list[str]) -> tuple[str, ...]:
    if not links:
        return ()
    more = f" and {len(links) - 1} more" if len(links) > 1 else ""
    return (
        f"environment: {links[0].upper()}{more} ignored: Kubernetes sets them for a Service of "
        "that name; enableServiceLinks: false in the Pod leaves them out",
    )


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes sets it, as KVROUTER_DECODE_PORT for a Service `kvrouter-decode`.

    Source: kubernetes.io/docs/concepts/services-networking/service/#environment-variables.
    """
    if _PART_NAME.fullmatch(name.upper()):
        return True
    return bool(_URL_NAME.fullmatch(name.upper()) and _URL.fullmatch(value))


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """Settings that passed validation."""

    settings: S  # the values
    origins: Mapping[str, str]  # where each given value came from, by name; defaults are left out
    advice: tuple[str, ...] = ()  # sentences about what was ignored


def load(
    model: type[S],
    flags: Mapping[str, Any],
    config: str | None = None,
    elsewhere: Callable[[], Collection[str]] = tuple,
) -> Loaded[S]:
    """Merge flags over the environment over the YAML file over defaults, and validate.

    `elsewhere` returns the variables that other commands read; it is called only if a variable
    looks misspelt. UsageError: values are wrong, or the file is.
    """
    known = {option.name: option for option in options(model)}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    if config is not None:
        try:
            file = read_settings_file(config, known)
        except UnreadableFile as error:
            raise UsageError(f"--config {error}") from None
        problems += (f"--config {problem}" for problem in file.problems)
        values.update(file.values)
        origins.update({name: f"file {place}" for name, place in file.places.items()})
    prefix = env_prefix(model)
    found, variables, advice = read_environment(model)
    problems += _misspelt(prefix, variables, known, elsewhere)
    values.update(found)
    origins.update({name: f"environment {known[name].env}" for name in found})
    values.update(flags)
    origins.update(dict.fromkeys(flags, "flag"))
    try:
        settings = model(**values)
    except ValidationError as error:
        problems += complaints(error, known, origins)
    except UnicodeEncodeError:  # what pydantic raises for a message with such a value
        problems.append("a value is not UTF-8; write it as UTF-8 text")
    if problems:
        raise UsageError(*problems)
    return Loaded(settings, origins, advice)


def _misspelt(
    prefix: str,
    variables: Iterable[str],
    known: Iterable[str],
    elsewhere: Callable[[], Collection[str]],
) -> Iterator[str]:
    """A sentence for each variable that no command reads and that resembles a setting's."""
    names = [name.upper() for name in known]
    for variable in sorted(variables):
        name = variable.removeprefix(prefix)
        near = get_close_matches(name, names, 1, _MISSPELT)
        if near and name != near[0] and variable not in elsewhere():
            yield f"environment: no setting {variable}; did you mean {prefix}{near[0]}?"
