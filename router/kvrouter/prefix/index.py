"""Which engine's own cache holds which block. Bounded; one thread."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from sys import byteorder
from typing import TYPE_CHECKING, Final

from kvrouter._native import PrefixTable
from kvrouter.telemetry.series import CacheUse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvrouter.engines.engine import Engine

MAX_ENGINES: Final = 2048
"""Engines in the index at a time, with those that left and are not swept yet."""

SWEPT_SLOTS: Final = 32768  # slots of the table in one step of a sweep: a fraction of a millisecond

HASH_WORDS: Final = 4
END: Final = (1 << 64) - 1  # beyond the last slot of any table


STEP_TOKENS: Final = 1024
"""Of a chain one block in so many tokens stands for all: each one would take time and memory."""
MOST_HELD: Final = 1 << 17  # blocks that stand for an engine: 134 million tokens, about 14 MiB


class Ageing:
    """The blocks that stand for what one engine holds, in the order of their last use.

    As vLLM and SGLang do, it evicts the least recently used prefix, the end of a chain first.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[int, int] = OrderedDict()  # tokens for which each stands
        self._tokens = 0

    def used(self, ids: array[int], block_tokens: int, cache_tokens: int) -> array[int]:
        """The engine used a chain of blocks; returns those that it had to evict for them.

        They are the last ones of their steps: without them their chains match no further.
        """
        step, held = max(1, STEP_TOKENS // block_tokens), self._held
        if len(ids) < step:
            step = len(ids) or 1
        for last in reversed(ids[step - 1 :: step]):
            self._tokens += step * block_tokens - held.pop(last, 0)
            held[last] = step * block_tokens
        gone = array("Q")
        while self._tokens > cache_tokens or len(held) > MOST_HELD:
            last, tokens = held.popitem(last=False)
            self._tokens -= tokens
            gone.append(last)
        return gone


def block_ids(hashes: bytes) -> array[int]:
    """Low 64 bits (last 8 bytes, big-endian) of each 32-byte hash: the ids in vLLM's KV events."""
    words = array("Q", hashes)[HASH_WORDS - 1 :: HASH_WORDS]
    if byteorder == "little":
        words.byteswap()
    return words


class PrefixIndex:
    """What each engine holds, by its KV events or by the router's own legs.

    It is a hint: an engine may have evicted since. Beyond `max_blocks` it forgets blocks that were
    not stored or matched lately. Of several cache groups only those with the whole history count
    (`BlockNaming.counts_for`). `clear` forgets an engine in O(1); `sweep` frees its number later.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._table = PrefixTable(max_blocks)
        self._numbers: dict[Engine, int] = {}
        self._engines: list[Engine] = []  # by number; where none has it, its last one
        self._free: list[int] = []  # numbers that engines had
        self._retired: list[int] = []
        self._sweeping: list[int] = []
        self._ageing: dict[Engine, Ageing] = {}  # of engines whose blocks are guessed

    def __len__(self) -> int:
        """Blocks in the table."""
        return len(self._table)

    @property
    def forgotten(self) -> int:
        """Blocks forgotten so far because of `max_blocks`."""
        return self._table.evicted

    @property
    def memory_bytes(self) -> int:
        """Memory of the full table, for any number of engines."""
        return self._table.memory_bytes

    @property
    def use(self) -> CacheUse:
        """Its blocks, and their share of the table's memory.

        They are spread over it: the kernel commits most of the table after few blocks.
        """
        blocks, most_bytes = len(self), self.memory_bytes
        return CacheUse(blocks, most_bytes * blocks // self._max_blocks, most_bytes)

    def clear(self, engine: Engine) -> None:
        """Forget all that `engine` holds; it may store again. O(1)."""
        self._ageing.pop(engine, None)
        number = self._numbers.pop(engine, None)
        if number is not None:
            self._table.retire(number)
            self._retired.append(number)

    def stored(self, engine: Engine, ids: Iterable[int]) -> bool:
        """`engine` holds these blocks now, by the low 64 bits of their hashes.

        False: there are too many engines to remember any of it.
        """
        number = self._number(engine)
        if number is not None:
            self._table.store(number, _packed(ids))
        return number is not None

    def credit(self, engine: Engine, hashes: bytes) -> None:
        """`engine` holds these blocks now, by their 32-byte hashes."""
        number = self._number(engine)
        if number is not None:
            self._table.store_hashes(number, hashes)

    def guess(self, engine: Engine, hashes: bytes, block_tokens: int) -> None:
        """`engine` probably holds these blocks now, and has evicted others if its cache is full."""
        self.credit(engine, hashes)
        cache_tokens = engine.kv_tokens
        if cache_tokens is None:
            return
        age = self._ageing.setdefault(engine, Ageing())
        gone = age.used(block_ids(hashes), block_tokens, cache_tokens)
        if gone:
            self.removed(engine, gone)

    def removed(self, engine: Engine, ids: Iterable[int]) -> None:
        """`engine` holds these blocks no longer; unknown ones are ignored."""
        number = self._numbers.get(engine)
        if number is not None:
            self._table.remove(number, _packed(ids))

    def match(self, hashes: bytes) -> Mapping[Engine, int]:
        """Leading blocks of a chain that engines hold; engines with none are absent."""
        return self._table.match(hashes, self._engines)

    def held(self, engine: Engine, end: int | None = None) -> tuple[int, bytes]:
        """Some of the blocks that `engine` holds: (`end` of the next call, ids as native uint64).

        0: no more blocks. Blocks stored or removed between two calls may be missing or not.
        """
        number = self._numbers.get(engine)
        if number is None:
            return 0, b""
        return self._table.held(number, END if end is None else end, SWEPT_SLOTS)

    def sweep(self, max_slots: int = SWEPT_SLOTS) -> bool:
        """Clean so many slots of engines that left; returns whether all are clean.

        To be called regularly: only swept numbers are used again.
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
            if not self._free and len(self._engines) < MAX_ENGINES:
                self._free.append(len(self._engines))
                self._engines.append(engine)
            while not self._free and not self.sweep():
                pass  # a number of an engine that left is needed now
            if not self._free:
                return None
            number = self._numbers[engine] = self._free.pop()
            self._engines[number] = engine
        return number


def _packed(ids: Iterable[int]) -> bytes:
    return (ids if isinstance(ids, array) else array("Q", ids)).tobytes()
