"""Which chunks are in an engine's host memory, and where. Imports no vLLM.

What was used last is evicted last; of one prompt the end goes before the beginning, without which
nothing finds it.
"""

from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

from kvrouter_store.connectors.vllm.room import Chunk


class Taken(NamedTuple):
    """Chunks that were absent and have numbers now, and those that were evicted for them."""

    keys: list[bytes]
    numbers: list[int]
    evicted: list[bytes]


class ChunkTable:
    """Of the scheduler's thread. A chunk is absent, coming, idle, or held as often as it is read.

    Its operations take runs of chunks, with no call of Python for each.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.clear()

    def clear(self) -> None:
        """Forget all chunks, in whatever state they are."""
        self._numbers: dict[bytes, int] = {}
        self._idle: dict[bytes, None] = {}  # the first is evicted first
        self._coming: set[bytes] = set()
        self._held: set[bytes] = set()
        self._more: dict[bytes, int] = {}  # holds of a chunk beyond the first
        self._free = list(range(self.chunks))

    @property
    def free(self) -> int:
        """Numbers that are free, or whose chunks may be evicted."""
        return len(self._free) + len(self._idle)

    @property
    def there(self) -> int:
        """Chunks that are here, or coming."""
        return len(self._numbers)

    @property
    def coming(self) -> int:
        """Chunks that are being written."""
        return len(self._coming)

    def state(self, key: bytes) -> Chunk:
        """Where a chunk is."""
        if key not in self._numbers:
            return Chunk.ABSENT
        if key in self._idle:
            return Chunk.IDLE
        return Chunk.COMING if key in self._coming else Chunk.HELD

    def absent(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those that are not here."""
        return [key for key in keys if key not in self._numbers]

    def take(self, keys: Collection[bytes]) -> Taken | None:
        """Numbers for those that are absent, which are coming now; None if there is no room."""
        new = self.absent(keys)
        short, evicted = max(0, len(new) - len(self._free)), list[bytes]()
        if short:
            wanted = set(keys)
            evicted = list(islice((key for key in self._idle if key not in wanted), short))
            if len(evicted) < short:
                return None
            for key in evicted:
                del self._idle[key]
            self._free += map(self._numbers.pop, evicted)
        first = len(self._free) - len(new)
        numbers = self._free[first:]
        del self._free[first:]
        self._numbers.update(zip(new, numbers, strict=True))
        self._coming.update(new)
        return Taken(new, numbers, evicted)

    def came(self, keys: Iterable[bytes], *, good: bool) -> list[bytes]:
        """Those of `keys` that were coming; they are there now, or absent again."""
        those = [key for key in keys if key in self._coming]
        self._coming.difference_update(those)
        if good:
            self._idle.update(dict.fromkeys(those))
        else:
            self._free += map(self._numbers.pop, those)
        return those

    def pass_on(self, keys: Collection[bytes]) -> list[int]:
        """Those that were coming are there, and held; their numbers."""
        assert self._coming.issuperset(keys)
        self._coming.difference_update(keys)
        self._held.update(keys)
        return list(map(self._numbers.__getitem__, keys))

    def hold(self, keys: Collection[bytes]) -> list[int]:
        """Let chunks that are there not be evicted; their numbers. Each hold is to be undone."""
        assert self._coming.isdisjoint(keys)
        numbers = list(map(self._numbers.__getitem__, keys))
        for key in self._held.intersection(keys):
            self._more[key] = self._more.get(key, 0) + 1
        self._held.update(keys)
        for key in keys:
            self._idle.pop(key, None)
        return numbers

    def let_go(self, keys: Collection[bytes]) -> None:
        """Undo a hold; the first of `keys` is evicted first."""
        assert self._held.issuperset(keys)
        if self._more:
            keys = [key for key in keys if not self._still_held(key)]
        self._held.difference_update(keys)
        self._idle.update(dict.fromkeys(keys))

    def _still_held(self, key: bytes) -> bool:
        more = self._more.pop(key, 0)
        if more > 1:
            self._more[key] = more - 1
        return more > 0
