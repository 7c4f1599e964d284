"""Keys that the router shows to engines, in place of whatever its clients brought."""

from __future__ import annotations

import re
import stat
from typing import TYPE_CHECKING, Final

from kvrouter.credentials.caller_keys import check_key, read_private
from kvrouter.options.addresses import bare_address, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


REFUSALS: Final = frozenset({401, 403})
"""Statuses by which an engine says that it was shown no key, or a wrong one."""
_OF_ONE: Final = re.compile(r"([^=\s]+:\d{1,5})=(.+)")
_AUTHORIZATION: Final = re.compile(rb"^authorization:[^\r\n]*\r\n", re.MULTILINE)


class WorkerKeys:
    """What engines are shown: a key for all, or one for each.

    Args:
        keys: by the engine's `HOST:PORT`; under "" that of all others.

    Attributes:
        alone: whether no client's Authorization ever reaches an engine, for clients have keys of
            the router.
    """

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self.alone = False
        self._lines: dict[str, bytes] = {}
        self.follow(keys or {})

    def follow(self, keys: Mapping[str, str]) -> None:
        """From now on engines are shown these."""
        self._lines = {
            address: f"authorization: Bearer {key}\r\n".encode("ascii")
            for address, key in keys.items()
        }

    def shown(self, address: str, fields: bytes) -> bytes:
        """Header lines of a request to an engine: its key in place of the client's, if it has one.

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
        """The same for a request that is the router's own."""
        line = self.shown(address, b"").decode("ascii")
        return {"authorization": line.partition(": ")[2].strip()} if line else {}

    def judged(self, address: str, status: int) -> bool:
        """Whether `status` is the engine's word on a key that is the router's, not the client's."""
        if status not in REFUSALS:
            return False
        return self.alone or bool(self.shown(address, b""))


def read_worker_keys(path: str) -> list[str]:
    """Keys of a file, one on each line, as `KEY` or `HOST:PORT=KEY`; `#` begins a remark.

    Raises:
        ValueError: what must be changed, in a sentence.
    """
    forbidden = stat.S_IRWXO | stat.S_IWGRP
    text = read_private(path, forbidden, "can be read by others: chmod 600")
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"{path} holds no key; write KEY or HOST:PORT=KEY on a line")
    return found


def by_engine(given: Iterable[str]) -> dict[str, str]:
    """Keys by the engine's `HOST:PORT`, from `KEY` (under "") and `HOST:PORT=KEY`.

    Raises:
        ValueError: one cannot be used, or two are for the same; repeats no key.
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
