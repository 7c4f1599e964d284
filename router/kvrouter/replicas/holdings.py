"""Blocks that engines hold, as routers tell each other.

A router guesses the blocks of an engine without KV events from the requests that it sends there,
and shares its guesses. A router that joins later, or missed a message, gets a snapshot in pieces.
Engines with KV events are left out: each router receives their events itself.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvrouter.prefix.index import PrefixIndex, block_ids
from kvrouter.prefix.learnt import PIECES
from kvrouter.replicas.messages import MAX_PIECE_BLOCKS, Domain, Guess, Item

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool
    from kvrouter.prefix.events.tracker import CacheTracker

_ROOT_BYTES: Final = 8
_ID_BYTES: Final = 8
_HASH_BYTES: Final = 32


@dataclass(eq=False)
class Holdings:
    """Sends guesses by `queue`, and receives those of other routers.

    The `tracker` knows which engines publish KV events; None if the router receives none.
    """

    pool: EnginePool
    index: PrefixIndex
    tracker: CacheTracker | None
    queue: Callable[[Item], None]
    counts: Counter[str]

    def send(self, engine: Engine, hashes: bytes) -> None:
        """This router guesses that `engine` holds these blocks, whose tokens it sent there."""
        domain = domain_of(engine)
        if domain is None:
            return
        for at in range(0, len(hashes), MAX_PIECE_BLOCKS * _HASH_BYTES):
            ids = block_ids(hashes[at : at + MAX_PIECE_BLOCKS * _HASH_BYTES])
            self.queue(Guess(engine.address, domain, ids.tobytes()))

    def receive(self, guess: Guess) -> None:
        """Another router guesses these blocks."""
        engine = self.pool.target(guess.address)
        if engine is None or domain_of(engine) != guess.domain or len(guess.ids) % _ID_BYTES:
            self.counts["guesses_refused"] += 1
        elif not self._has_events(engine):
            self.counts["guesses_taken"] += 1
            self.index.stored(engine, array("Q", guess.ids))
            if self.tracker is not None:
                self.tracker.guessed(engine)

    def snapshot(self) -> Iterator[Item | None]:
        """All guesses of this router in pieces, each as it is when it is taken.

        None after a step without blocks, so that the caller can yield to others.
        """
        for engine in tuple(self.pool.targets()):
            domain = domain_of(engine)
            if domain is not None and not self._has_events(engine):
                for ids in self._pieces(engine):
                    yield Guess(engine.address, domain, ids) if ids else None

    def _pieces(self, engine: Engine) -> Iterator[bytes]:
        end: int | None = None
        while end != 0:
            end, ids = self.index.held(engine, end)
            for at in range(0, len(ids) or 1, MAX_PIECE_BLOCKS * _ID_BYTES):
                yield ids[at : at + MAX_PIECE_BLOCKS * _ID_BYTES]

    def _has_events(self, engine: Engine) -> bool:
        return self.tracker is not None and self.tracker.reports(engine)


def domain_of(engine: Engine) -> Domain | None:
    """What gives the ids of its blocks their meaning; None while it is not in the pool."""
    if engine.identity is None:
        return None
    domain = engine.identity.domain or PIECES
    return Domain(domain.block_tokens, domain.root[:_ROOT_BYTES])
