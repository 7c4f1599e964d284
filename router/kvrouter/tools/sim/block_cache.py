"""Which blocks an engine holds, and in which slots. Pure: it moves no bytes and has no clock.

As in vLLM: a request gets all its slots when it is admitted, and shares those of its cached prefix.
A slot gets a name when its block is full and computed. A named slot that no request uses stays
until it is needed: the least recently used goes first, and a block before its parent.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stored:
    """Blocks became available, each the child of the one before."""

    parent: bytes | None
    hashes: tuple[bytes, ...]
    token_ids: tuple[int, ...]
    cache_salt: str | None = None
    adapter: tuple[str, str] | None = None
    medium: str = "GPU"


@dataclass(frozen=True)
class Removed:
    """Blocks were evicted."""

    hashes: tuple[bytes, ...]
    medium: str = "GPU"


@dataclass(frozen=True)
class Cleared:
    """The cache was emptied."""


Event = Stored | Removed | Cleared


@dataclass
class Allocation:
    """The slots of one request, in the order of its blocks. Release it exactly once."""

    slots: list[int]
    cached_blocks: int
    released: bool = field(default=False, compare=False)


class BlockCache:
    """Slots 0..capacity-1, each free, held by requests, or cached under a block's hash."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._slot_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._removed: list[bytes] = []

    @property
    def held_blocks(self) -> int:
        """Slots that running requests hold."""
        return len(self._users)

    def matched(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are cached."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._slot_of:
                return index
        return len(hashes)

    def allocate(self, hashes: Sequence[bytes], blocks: int) -> Allocation | None:
        """Slots for a request of `blocks` blocks, of which the leading `hashes` may be cached.

        None if there is no room now; nothing has changed then.
        """
        cached = self.matched(hashes[:blocks])
        slots = [self._slot_of[block_hash] for block_hash in hashes[:cached]]
        idle_taken = sum(1 for slot in slots if slot in self._idle)
        if blocks - cached > len(self._free) + len(self._idle) - idle_taken:
            return None
        for slot in slots:
            self._hold(slot)
        for _ in range(blocks - cached):
            slot = self._free.pop() if self._free else self._evict()
            self._hold(slot)
            slots.append(slot)
        return Allocation(slots, cached)

    def name(self, allocation: Allocation, index: int, block_hash: bytes) -> bool:
        """Let others use block `index` of a request, which is full.

        False if there is one already. The request keeps its own copy in any case.
        """
        slot = allocation.slots[index]
        if block_hash in self._slot_of:
            return False
        self._slot_of[block_hash] = slot
        self._hash_of[slot] = block_hash
        return True

    def release(self, allocation: Allocation) -> None:
        """End a request. Its named blocks stay cached; the last one is evicted first."""
        if allocation.released:
            raise ValueError("an allocation is released once")
        allocation.released = True
        for slot in reversed(allocation.slots):
            self._users[slot] -= 1
            if self._users[slot]:
                continue
            del self._users[slot]
            if slot in self._hash_of:
                self._idle[slot] = None
            else:
                self._free.append(slot)

    def clear(self) -> None:
        """Forget every block that no request holds."""
        while self._idle:
            self._free.append(self._evict())

    def take_removed(self) -> tuple[bytes, ...]:
        """The blocks evicted since the last call."""
        removed = tuple(self._removed)
        self._removed.clear()
        return removed

    def _hold(self, slot: int) -> None:
        self._idle.pop(slot, None)
        self._users[slot] = self._users.get(slot, 0) + 1

    def _evict(self) -> int:
        slot, _ = self._idle.popitem(last=False)
        block_hash = self._hash_of.pop(slot)
        del self._slot_of[block_hash]
        self._removed.append(block_hash)
        return slot
