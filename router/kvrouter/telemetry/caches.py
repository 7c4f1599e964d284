"""How full bounded caches are, and the metrics that tell it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvrouter.telemetry.metrics import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvrouter.telemetry.metrics import Row

__all__ = ["BoundedCache", "CacheUse", "cache_readings"]

_TEXTS: Final = {
    "entries": "Entries of a cache: prompts whose token ids (tokens) or block hashes "
    "(block_hashes) are remembered.",
    "bytes": "Memory that the entries of a cache take.",
    "max_bytes": "Memory that the entries of a cache may take; the oldest make room.",
}


class CacheUse(NamedTuple):
    """Entries of a cache, the bytes of memory that they take, and how many these may be."""

    entries: int
    bytes: int
    max_bytes: int


class BoundedCache(Protocol):
    """What remembers things in a bounded memory."""

    @property
    def use(self) -> CacheUse:
        """How full it is now."""


def cache_readings(caches: Mapping[str, BoundedCache]) -> Iterator[Reading]:
    """A gauge for each field of CacheUse, with a row for each cache by its name."""
    for field, text in _TEXTS.items():
        yield Reading(f"kvrouter:cache_{field}", text, partial(_rows, field, caches), ["cache"])


def _rows(field: str, caches: Mapping[str, BoundedCache]) -> Iterator[Row]:
    for name, cache in caches.items():
        yield (name,), float(getattr(cache.use, field))
