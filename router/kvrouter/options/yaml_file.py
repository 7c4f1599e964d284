"""Reads a YAML file of settings: values with their lines, and wrong names.

It knows no setting by name, and validates no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvrouter.options.bounded_yaml import TooMuch, bounded_root
from kvrouter.options.complaints import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The contents of a file.

    Attributes:
        values: by the setting's name.
        places: `FILE:LINE` of each.
        problems: sentences about wrong names.
    """

    values: Mapping[str, Any]
    places: Mapping[str, str]
    problems: tuple[str, ...]


class UnreadableFile(Exception):
    """The file cannot be read, or is no mapping; a sentence with the remedy."""


def read_settings_file(path: str, known: Collection[str]) -> SettingsFile:
    """Read `path`, in which names may have dashes or underscores.

    A name that is not in `known`, or occurs twice, is a problem and has no value.

    Raises:
        UnreadableFile: see there.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    problems = []
    for written, line, value in _members(path):
        name, place = written.replace("-", "_"), f"{path}:{line}"
        if name not in known:
            problems.append(f"{place}: no setting {written!r}{did_you_mean(name, known)}")
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
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)  # its text may be a secret
        line = f" (line {mark.line + 1})" if mark is not None else ""
        raise UnreadableFile(f"{path}: not YAML{line}; write `name: value` lines") from None
