"""API keys that the router sends to engines in place of its clients' Authorization."""

from __future__ import annotations

import re
import stat
from typing import TYPE_CHECKING, Final

from kvrouter.credentials.caller_keys import check_key
from kvrouter.options.addresses import bare_address, parse_address
from kvrouter.options.secret_file import read_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


REFUSALS: Final = frozenset({401, 403})
"""Statuses of an engine that misses a key, or got a wrong one."""
_OF_ONE: Final = re.compile(r"([^=\s]+:\d{1,5})=(.+)")
_AUTHORIZATION: Final = re.compile(rb"^authorization:[^\r\n]*\r\n", re.MULTILINE)


class WorkerKeys:
    """A key for all engines, or one for each.

    Args:
        keys: by the engine's `HOST:PORT`; under "" that of all others.
    """

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        # Whether no client's Authorization reaches an engine, because clients have keys of the
        # router.
        self.alone = False
        self._lines: dict[str, bytes] = {}
        self.follow(keys or {})

    def follow(self, keys: Mapping[str, str]) -> None:
        """Replace the keys."""
        self._lines = {
            address: f"authorization: Bearer {key}\r\n".encode("ascii")
            for address, key in keys.items()
        }

    def shown(self, address: str, fields: bytes) -> bytes:
        """Header lines of a request to an engine, with its key in place of the client's.

        Args:
            address: `HOST:PORT` of the engine.
            fields: header lines, names in lower case.
        """
        lines = self._lines
        if not lines:
            return fields
        line = lines.get(address) or lines.get("")
        return fields if line is None else _AUTHORIZATION.sub(b"", fields) + line

    def headers(self, address: str) -> dict[str, str]:
        """The headers of a request of the router itself."""
        line = self.shown(address, b"").decode("ascii")
        return {"authorization": line.partition(": ")[2].strip()} if line else {}

    def judged(self, address: str, status: int) -> bool:
        """Whether `status` refuses a key of the router rather than of the client."""
        if status not in REFUSALS:
            return False
        return self.alone or bool(self.shown(address, b""))


def read_worker_keys(path: str) -> list[str]:
    """Keys of a file, one per line, as `KEY` or `HOST:PORT=KEY`; `#` begins a comment.

    ValueError: a sentence with the remedy.
    """
    forbidden = stat.S_IRWXO | stat.S_IWGRP
    text = read_private(path, forbidden, "can be read by other users: chmod 600")
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"{path} has no key; write a line KEY or HOST:PORT=KEY")
    return found


def by_engine(given: Iterable[str]) -> dict[str, str]:
    """Keys by the engine's `HOST:PORT`, from `KEY` (under "") and `HOST:PORT=KEY`.

    ValueError: one cannot be used, or two are for the same engine; a sentence without keys.
    """
    found: dict[str, str] = {}
    for item in given:
        one = _OF_ONE.fullmatch(item)
        address = bare_address(parse_address(one[1])) if one else ""
        key = check_key(one[2] if one else item)
        if found.get(address, key) != key:
            raise ValueError(f"two keys for {address or 'all engines'}; give one")
        found[address] = key
    return found
