"""Which engines will hold which blocks once the legs in flight there have ended.

A hint for the choice of an engine: two prompts of one burst with the same beginning belong on one
engine, though neither is computed yet. It never justifies skipping a prefill leg. One thread;
bounded by the legs in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.telemetry.series import CacheUse
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvrouter.engines.engine import Engine


LEAST_BLOCKS: Final = 4  # prompts with fewer blocks in common may go anywhere
MOST_MARKS: Final = 20  # of one prompt: more tokens than the largest body has, in blocks of 16
MARK_BYTES: Final = 192  # what a marked block takes: its hash, its engines, its place


@dataclass(eq=False)
class InFlightPrefixes:
    """Chains of block hashes by the engines that have them in flight.

    A chain is marked at its 4th, 8th, 16th block and so on. That costs the logarithm of its length,
    and a match is too short by half at most.
    """

    most: Callable[[], int]  # prompts in flight at a time
    _engines: dict[bytes, list[Engine]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        """Marked blocks."""
        return len(self._engines)

    @property
    def use(self) -> CacheUse:
        """Marked blocks, and their memory, as that of a cache; `most` bounds it."""
        marks, most_bytes = len(self), self.most() * MOST_MARKS * MARK_BYTES
        return CacheUse(marks, marks * MARK_BYTES, most_bytes)

    def add(self, engine: Engine, marks: Sequence[bytes]) -> None:
        """A leg with a prompt of these `marks_of` is in flight, until `remove`."""
        for mark in marks:
            self._engines.setdefault(mark, []).append(engine)

    def remove(self, engine: Engine, marks: Sequence[bytes]) -> None:
        """One such leg has ended."""
        for mark in marks:
            engines = self._engines[mark]
            engines.remove(engine)
            if not engines:
                del self._engines[mark]

    def match(self, hashes: bytes) -> Mapping[Engine, int]:
        """Leading blocks of the chain that engines will hold; engines with none are absent."""
        found: dict[Engine, int] = {}
        for number, mark in enumerate(marks_of(hashes) if self._engines else ()):
            if mark not in self._engines:
                break
            found.update(dict.fromkeys(self._engines[mark], LEAST_BLOCKS << number))
        return found


def marks_of(hashes: bytes) -> Sequence[bytes]:
    """The blocks at which a chain is marked."""
    marks, end = [], LEAST_BLOCKS * HASH_BYTES
    while end <= len(hashes):
        marks.append(hashes[end - HASH_BYTES : end])
        end *= 2
    return marks
