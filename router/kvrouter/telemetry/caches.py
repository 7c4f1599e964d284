"""Metrics of bounded caches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from pydantic import ByteSize

from kvrouter.telemetry.series import Reading, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TEXTS: Final = {
    "entries": "Entries of a cache: prompts with their token ids (tokens) or block hashes "
    "(block_hashes), marked blocks of prompts in flight (in_flight).",
    "bytes": "Memory of the entries of a cache.",
    "max_bytes": "Limit of the memory of a cache: the oldest entries make room; of in_flight, by "
    "--max-concurrent-requests.",
}


class CacheUse(NamedTuple):
    """Entries of a cache, their memory, and its limit."""

    entries: int
    bytes: int
    max_bytes: int


class BoundedCache(Protocol):
    """A cache with bounded memory."""

    @property
    def use(self) -> CacheUse:
        """Its entries and memory now."""


def cache_readings(caches: Mapping[str, BoundedCache]) -> Iterator[Reading]:
    """A gauge for each field of CacheUse, with a row for each cache."""
    for field, text in _TEXTS.items():
        yield Reading(f"kvrouter:cache_{field}", text, partial(_rows, field, caches), ["cache"])


def bounds(caches: Mapping[str, BoundedCache]) -> str:
    """The limits of caches, on one line for people."""
    sizes = {name: ByteSize(cache.use.max_bytes) for name, cache in caches.items()}
    return ", ".join(f"{name} {size.human_readable()}" for name, size in sizes.items())


def _rows(field: str, caches: Mapping[str, BoundedCache]) -> Iterator[Row]:
    return ((name, getattr(cache.use, field)) for name, cache in caches.items())
