"""What a store should hold, as dictionaries. Knows no node: it is told what was done by whom."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

__all__ = ["Block", "Held", "Key", "StoreModel"]

Block = tuple[str, int]  # chain, place in it
Key = tuple[str, int, int]  # and part


@dataclass(eq=False)
class Held:
    """A lease: the blocks it is on, in their present life, and the version of their bytes.

    `in_place`: its holder pinned slots in the pool without asking the node.
    """

    owner: Hashable
    lives: list[tuple[Block, int]]
    versions: dict[Key, int]
    in_place: bool = False


@dataclass
class StoreModel:
    """Blocks of chains, each of `parts` parts of one slot, in a pool of `slots` slots."""

    slots: int
    parts: int
    committed: dict[Key, int] = field(default_factory=dict)  # the version of the bytes
    reserved: dict[Key, Hashable] = field(default_factory=dict)  # by whom
    # Reservations that another writer's whole part has taken the place of.
    superseded: list[tuple[Hashable, Key]] = field(default_factory=list)
    fenced: Counter[Hashable] = field(default_factory=Counter)  # slots of writers cut off
    leases: list[Held] = field(default_factory=list)
    waits: int = 0
    _life: Counter[Block] = field(default_factory=Counter)
    _leaving: dict[tuple[Block, int], int] = field(default_factory=dict)  # slots

    def parts_of(self, block: Block) -> list[Key]:
        return [(*block, part) for part in range(self.parts) if (*block, part) in self.committed]

    def resident(self, block: Block) -> bool:
        keys = [(*block, part) for part in range(self.parts)]
        return any(key in self.committed or key in self.reserved for key in keys)

    def blocks(self) -> set[Block]:
        return {key[:2] for key in (*self.committed, *self.reserved)}

    def run(self, chain: str, span: range) -> int:
        """How many leading blocks have all their parts: others are not to be had."""
        whole = [len(self.parts_of((chain, k))) == self.parts for k in span]
        return (*whole, False).index(False)

    def supersede(self, key: Key) -> None:
        """The part is there from another than who has it reserved."""
        self.superseded.append((self.reserved.pop(key), key))

    def settle(self, owner: Hashable, key: Key) -> bool:
        """A reservation ends in good order; False if it was superseded."""
        if (owner, key) in self.superseded:
            self.superseded.remove((owner, key))
            return False
        del self.reserved[key]
        return True

    def forget(self, block: Block) -> bool:
        """Take what is committed out of sight; leased, it keeps its slots. False: nothing was."""
        keys = self.parts_of(block)
        for key in keys:
            del self.committed[key]
        life = (block, self._life[block])
        if keys and any(life in held.lives for held in self.leases):
            self._leaving[life] = len(keys)
        self._life[block] += bool(keys)
        return bool(keys)

    def lease(self, owner: Hashable, chain: str, blocks: int, *, in_place: bool = False) -> Held:
        """A lease on the first blocks of a chain, all of which are whole."""
        names = [(chain, k) for k in range(blocks)]
        versions = {key: self.committed[key] for name in names for key in self.parts_of(name)}
        lives = [(name, self._life[name]) for name in names]
        held = Held(owner, lives, versions, in_place)
        if blocks:
            self.leases.append(held)
        return held

    def release(self, held: Held) -> bool:
        """End a lease; False if it had ended."""
        if held not in self.leases:
            return False
        self.leases.remove(held)
        pinned = self.pinned()
        for life in [life for life in self._leaving if life not in pinned]:
            del self._leaving[life]
        return True

    def gone(self, owner: Hashable, *, fenced: bool) -> None:
        """The owner lost its connection, and with it all it held; what it could write is fenced."""
        for key in [key for key, who in self.reserved.items() if who == owner]:
            del self.reserved[key]
            self.fenced[owner] += fenced
        for late in [late for late in self.superseded if late[0] == owner]:
            self.superseded.remove(late)
            self.fenced[owner] += fenced
        for held in [held for held in self.leases if held.owner == owner]:
            self.release(held)

    def pinned(self) -> set[tuple[Block, int]]:
        return {life for held in self.leases for life in held.lives}

    def pinned_by_the_node(self) -> set[tuple[Block, int]]:
        """What it must count as pinned: the rest it may learn of, where it wants to evict that."""
        return {life for held in self.leases if not held.in_place for life in held.lives}

    def is_pinned(self, block: Block) -> bool:
        return (block, self._life[block]) in self.pinned()

    def evictable(self) -> set[Block]:
        """Leaves that nobody leases or writes."""
        return {
            block
            for block in {key[:2] for key in self.committed}
            if not self.is_pinned(block)
            and not any((*block, part) in self.reserved for part in range(self.parts))
            and not self.resident((block[0], block[1] + 1))
        }

    def used_slots(self) -> int:
        """Slots that something is in, or was and may not be reused yet."""
        held = self.fenced.total() + sum(self._leaving.values())
        return len(self.committed) + len(self.reserved) + len(self.superseded) + held

    def gauges(self) -> dict[str, int]:
        """What the node must tell of itself."""
        return {
            "blocks": len(self.blocks()),
            "reserved_blocks": len(self.reserved),
            "fenced_blocks": self.fenced.total(),
            "leases": len(self.leases),
            "leased_blocks": sum(len(held.lives) for held in self.leases),
            "waits": self.waits,
        }

    def restart(self) -> None:
        """A new node: nothing is left, but writers of the old one do not know it yet."""
        self.superseded.clear()
        for kept in (self.committed, self.reserved, self.fenced, self.leases, self._leaving):
            kept.clear()
        self.waits = 0

    def take_all(self, blocks: Iterable[Block]) -> int:
        """Forget each of the blocks; how many there were."""
        return sum(self.forget(block) for block in blocks)
