"""Which engine's own cache holds which block: engines on top of the native table of blocks.

Synchronous, bounded, one thread.
"""

from __future__ import annotations

from array import array
from sys import byteorder
from typing import TYPE_CHECKING, Final

from kvrouter._native import PrefixTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvrouter.engines.engine import Engine

MAX_ENGINES: Final = 127
"""Engines whose caches are indexed at a time, those included that left and are not swept yet."""

SWEPT_SLOTS: Final = 65536
"""Slots of the table looked at in one step of a sweep: a fraction of a millisecond."""

HASH_WORDS: Final = 4
WHOLE: Final = (1 << 64) - 1
"""Beyond the last slot of any table."""


def block_ids(hashes: bytes) -> array[int]:
    """Low 64 bits (last 8 bytes, big-endian) of each 32-byte hash: the ids in vLLM's KV events."""
    words = array("Q", hashes)[HASH_WORDS - 1 :: HASH_WORDS]
    if byteorder == "little":
        words.byteswap()
    return words


class PrefixIndex:
    """What each engine holds, as far as its KV events (or the router's own legs) told.

    It is a hint: an engine may have evicted since. Beyond `max_blocks` the blocks that were neither
    stored nor matched lately are forgotten. `clear` forgets an engine that left at once, in
    O(1); `sweep` takes its marks out of the table later.
    """

    def __init__(self, max_blocks: int) -> None:
        self._table = PrefixTable(max_blocks)
        self._numbers: dict[Engine, int] = {}
        self._engines: dict[int, Engine] = {}  # by number
        self._free = list(range(MAX_ENGINES - 1, -1, -1))
        self._retired: list[int] = []
        self._sweeping: list[int] = []

    def __len__(self) -> int:
        """Blocks in the table."""
        return len(self._table)

    @property
    def forgotten(self) -> int:
        """Blocks that were forgotten, since it began, because `max_blocks` was reached."""
        return self._table.evicted

    @property
    def memory_bytes(self) -> int:
        """Memory of the table when it is full, however many engines there are."""
        return self._table.memory_bytes

    def clear(self, engine: Engine) -> None:
        """Forget all that `engine` held; what it stores from now on counts again. O(1)."""
        number = self._numbers.pop(engine, None)
        if number is not None:
            del self._engines[number]
            self._table.retire(number)
            self._retired.append(number)

    def stored(self, engine: Engine, ids: Iterable[int]) -> None:
        """`engine` holds these blocks now, named by the low 64 bits of their hashes."""
        number = self._number(engine)
        if number is not None:
            self._table.store(number, _packed(ids))

    def credit(self, engine: Engine, hashes: bytes) -> None:
        """The same for blocks named by their 32-byte hashes."""
        number = self._number(engine)
        if number is not None:
            self._table.store_hashes(number, hashes)

    def removed(self, engine: Engine, ids: Iterable[int]) -> None:
        """`engine` holds these blocks no longer; blocks that it never held are ignored."""
        number = self._numbers.get(engine)
        if number is not None:
            self._table.remove(number, _packed(ids))

    def match(self, hashes: bytes) -> Mapping[Engine, int]:
        """Leading blocks of a chain that each engine holds; engines with none are absent.

        Args:
            hashes: the chain from its first block on, 32 bytes per block.
        """
        engines = self._engines
        return {engines[number]: blocks for number, blocks in self._table.match(hashes)}

    def held(self, engine: Engine, end: int | None = None) -> tuple[int, bytes]:
        """Some of the blocks that `engine` holds, and where the next call goes on; 0: that was all.

        What is stored and removed between two calls may be in it or not; nothing else is missed.

        Args:
            engine: whose.
            end: what the call before returned.

        Returns:
            where to go on, and ids as native uint64.
        """
        number = self._numbers.get(engine)
        if number is None:
            return 0, b""
        return self._table.held(number, WHOLE if end is None else end, SWEPT_SLOTS)

    def sweep(self, max_slots: int = SWEPT_SLOTS) -> bool:
        """Take marks of engines that left out of that many slots; returns whether none are left.

        To be called now and then: only swept numbers are used again.
        """
        if not self._sweeping:
            if not self._retired:
                return True
            self._sweeping, self._retired = self._retired, []
        if self._table.sweep(max_slots):
            self._free += self._sweeping
            self._sweeping = []
        return not self._sweeping and not self._retired

    def _number(self, engine: Engine) -> int | None:
        number = self._numbers.get(engine)
        if number is None:
            while not self._free and not self.sweep():
                pass  # the numbers of engines that left are needed now
            if not self._free:
                return None
            number = self._numbers[engine] = self._free.pop()
            self._engines[number] = engine
        return number


def _packed(ids: Iterable[int]) -> bytes:
    return (ids if isinstance(ids, array) else array("Q", ids)).tobytes()
