"""Engines of a YAML file that is polled: edited by hand, written by a tool, or mounted.

inotify does not see network file systems, and of a mounted ConfigMap only that a link two folders
away has changed.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import yaml

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import both_roles, member_address, too_many
from kvrouter.options.bounded_yaml import TooMuch, bounded_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.membership.discovery.base import Listener, Members

LOOK_S: Final = 0.5
"""Between two looks at the file."""
MAX_BYTES: Final = 1 << 20
_ROLES: Final = {"prefill": Role.PREFILL, "decode": Role.DECODE, "store": Role.STORE}

Stamp = tuple[int, int, int, int]


class FileSource:
    """Reads a file of `prefill:`, `decode:` and `store:` lists whenever it has changed.

    It waits until two looks in a row find the same, since the file may still be written. A file
    that cannot be used changes nothing. `text` is a path or file:///PATH, else a ValueError.
    """

    def __init__(self, text: str, *, look_s: float = LOOK_S) -> None:
        self.path = _path(text)
        self.name = f"file:{self.path}"
        self._look_s = look_s

    async def follow(self, listener: Listener) -> None:
        """See `EngineSource`. Reports within two looks."""
        seen: Stamp | None = None
        read: Stamp | None = None
        first = True
        while True:
            try:
                stamp = await asyncio.to_thread(_stamp, self.path)
                if stamp != read and (first or stamp == seen):
                    await self._read(listener)
                    read = stamp
                seen = stamp
            except OSError as error:
                listener.failed(f"{self.path}: {error.strerror}")
                seen = read = None
            first = False
            await asyncio.sleep(self._look_s)

    async def _read(self, listener: Listener) -> None:
        try:
            members = await asyncio.to_thread(_engines, self.path)
        except ValueError as error:
            listener.failed(f"{self.path}: {error}")
        else:
            listener.named(members)


def parse_engines(content: bytes) -> Members:
    """The engines of a file; ValueError: it cannot be used; the sentence begins with the line."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"line 1: more than {MAX_BYTES} bytes are no list of members")
    members = both_roles(_listed(_document(content)))
    if problem := too_many(members):
        raise ValueError(f"line 1: {problem}")
    return members


def _document(content: bytes) -> yaml.MappingNode:
    try:
        root = bounded_root(yaml.SafeLoader(content.decode("utf-8")))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise ValueError(f"line {line}: not YAML: {error.problem or error.context}") from None
    except TooMuch as error:
        raise ValueError(f"line 1: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"line 1: not YAML: {reason}") from None
    if root is None:
        raise ValueError("line 1: the file is empty; write `decode: []` where there are no members")
    if not isinstance(root, yaml.MappingNode):
        raise _wrong(root, "not a mapping; write `prefill: [HOST:PORT, ...]` and `decode: [...]`")
    return root


def _listed(root: yaml.MappingNode) -> Iterator[tuple[str, Role]]:
    known = set()
    for key, value in root.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else None
        if name not in _ROLES:
            raise _wrong(key, f"no {name or 'such key'!r}; there are {', '.join(_ROLES)}")
        if name in known:
            raise _wrong(key, f"{name!r} is given twice")
        known.add(name)
        role = _ROLES[name]
        for item in _items(value):
            try:
                texts = item.value.replace(",", " ").split()
                addresses = [member_address(text, role) for text in texts]
            except ValueError as error:
                raise _wrong(item, str(error)) from None
            yield from ((address, role) for address in addresses)


def _items(value: yaml.Node) -> list[yaml.ScalarNode]:
    """The scalars of a list, or one scalar alone."""
    if isinstance(value, yaml.ScalarNode):
        return [] if value.tag.endswith(":null") else [value]
    items = value.value if isinstance(value, yaml.SequenceNode) else [value]
    for item in items:
        if not isinstance(item, yaml.ScalarNode):
            raise _wrong(item, "not an address; write HOST:PORT or http://HOST:PORT")
    return list(items)


def _wrong(node: yaml.Node, sentence: str) -> ValueError:
    return ValueError(f"line {node.start_mark.line + 1}: {sentence}")


def _path(text: str) -> Path:
    if "://" not in text:
        if not text.strip():
            raise ValueError("discovery '': give a file's path, or a URL")
        return Path(text)
    parts = urlsplit(text)
    if parts.netloc or not parts.path or parts.query or parts.fragment:
        raise ValueError(f"discovery {text!r}: give a file as its path, or as file:///PATH")
    return Path(unquote(parts.path))


def _stamp(path: Path) -> Stamp:
    """What changes when the file is written or replaced."""
    status = os.stat(path)
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _engines(path: Path) -> Members:
    with path.open("rb") as file:
        return parse_engines(file.read(MAX_BYTES + 1))
