"""Which engines will hold which blocks once the legs that are under way there have ended.

A hint to choose by: two prompts of one burst that begin alike belong on the same engine, though
neither has been computed yet. It is never a reason to skip a prefill leg. Synchronous, one thread;
bounded by the legs under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrouter.engines.engine import Engine


LEAST_BLOCKS: Final = 4
"""Prompts that have fewer blocks in common go anywhere."""


class InFlightPrefixes:
    """Chains of block hashes by the engines that have them under way.

    A chain is noted at some of its blocks, each twice as far as the one before: noting it and
    looking it up cost the logarithm of its length, and what is found is too short by half at most.
    """

    def __init__(self) -> None:
        self._engines: dict[bytes, list[Engine]] = {}

    def __len__(self) -> int:
        """Blocks that are noted."""
        return len(self._engines)

    def add(self, engine: Engine, marks: Sequence[bytes]) -> None:
        """A leg is under way on `engine`; `remove` must follow when it ends.

        Args:
            engine: where.
            marks: of its prompt, by `marks_of`.
        """
        for mark in marks:
            engines = self._engines.get(mark)
            if engines is None:
                self._engines[mark] = [engine]
            else:
                engines.append(engine)

    def remove(self, engine: Engine, marks: Sequence[bytes]) -> None:
        """One such leg has ended, well or not."""
        for mark in marks:
            engines = self._engines[mark]
            if len(engines) == 1:
                del self._engines[mark]
            else:
                engines.remove(engine)

    def match(self, hashes: bytes) -> Mapping[Engine, int]:
        """Leading blocks of the chain that engines will hold; engines with none are absent."""
        found: dict[Engine, int] = {}
        blocks = LEAST_BLOCKS
        engines = self._engines.get(_block(hashes, blocks)) if self._engines else None
        while engines is not None:
            for engine in engines:
                found[engine] = blocks
            blocks *= 2
            engines = self._engines.get(_block(hashes, blocks))
        return found


def marks_of(hashes: bytes) -> Sequence[bytes]:
    """The blocks at which a chain is noted: the 4th, 8th, 16th and so on."""
    marks, end = [], LEAST_BLOCKS * HASH_BYTES
    while end <= len(hashes):
        marks.append(hashes[end - HASH_BYTES : end])
        end *= 2
    return marks


def _block(hashes: bytes, number: int) -> bytes:
    """The hash of a block, counted from 1; empty beyond the last."""
    return hashes[(number - 1) * HASH_BYTES : number * HASH_BYTES]
