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

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import both_roles, member_address
from kvrouter.options.load import UnreadableFile, read_settings_file
from kvrouter.options.types import split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.membership.discovery.base import Listener, Members
    from kvrouter.options.load import SettingsFile

LOOK_S: Final = 0.5  # between two looks at the file
_ROLES: Final = (Role.PREFILL, Role.DECODE, Role.STORE)

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
            members = await asyncio.to_thread(read_members, self.path)
        except (UnreadableFile, ValueError) as error:
            listener.failed(str(error))
        else:
            listener.named(members)


def read_members(path: Path) -> Members:
    """The members of a file. UnreadableFile, ValueError: it cannot be used; a sentence."""
    file = read_settings_file(str(path), _ROLES)
    if file.problems:
        raise ValueError(file.problems[0])
    if not file.values:
        raise ValueError(f"{path}: it is empty; write `decode: []` where there are no members")
    return both_roles(_listed(file))


def _listed(file: SettingsFile) -> Iterator[tuple[str, Role]]:
    for name, value in file.values.items():
        role = Role(name)
        given = value if isinstance(value, list) else str(value or "")
        try:
            addresses = [member_address(text, role) for text in split(given)]
        except ValueError as error:
            raise ValueError(f"{file.places[name]}: {error}") from None
        yield from ((address, role) for address in addresses)


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
