"""A least-recently-used cache that is bounded by the memory of its entries."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from kvrouter.telemetry.caches import CacheUse

if TYPE_CHECKING:
    from collections.abc import Callable

K = TypeVar("K")
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """Keeps the entries used last, up to `max_bytes`, but none above `max_entry_bytes`.

    `size` returns the bytes of memory that an entry takes.
    """

    def __init__(self, max_bytes: int, max_entry_bytes: int, size: Callable[[K, V], int]) -> None:
        self._max_bytes = max_bytes
        self._max_entry_bytes = max_entry_bytes
        self._size = size
        self._bytes = 0
        self._entries: OrderedDict[K, V] = OrderedDict()

    @property
    def use(self) -> CacheUse:
        """Number of entries, and their memory."""
        return CacheUse(len(self._entries), self._bytes, self._max_bytes)

    def get(self, key: K) -> V | None:
        """The entry of `key`, which counts as used now."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Keep an entry in place of the one before; the oldest entries make room."""
        size = self._size(key, value)
        if size > self._max_entry_bytes:
            return
        before = self._entries.pop(key, None)
        if before is not None:
            self._bytes -= self._size(key, before)
        self._entries[key] = value
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._size(*self._entries.popitem(last=False))
