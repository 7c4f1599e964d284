"""What engines hold, told to other routers and learnt from them.

Of engines that do not tell it by KV events each router guesses by what it sent there, and the
guesses go on to the others. Who joins later, or has missed something, is told all of them in
pieces. Engines that tell are left out: each router believes what it hears of them itself.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.prefix.index import block_ids
from kvrouter.replicas.messages import (
    MAX_PIECE_BLOCKS,
    Domain,
    Guess,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool
    from kvrouter.prefix.events.tracker import CacheTracker
    from kvrouter.prefix.index import PrefixIndex
    from kvrouter.replicas.messages import Item

_ROOT_BYTES: Final = 8
_ID_BYTES: Final = 8
_HASH_BYTES: Final = 32


class Tell(Protocol):
    """Queues an item for one router, or for all."""

    def __call__(self, item: Item, router: str | None = None) -> None:
        """Does so. Never raises."""


class Holdings:
    """Both directions of it.

    Args:
        pool: knows engines by their names.
        index: what engines hold.
        tracker: who tells of its own cache, or None where no events are taken.
        tell: queues what is to be told.
        counts: what was told and taken.
    """

    def __init__(
        self,
        pool: EnginePool,
        index: PrefixIndex,
        tracker: CacheTracker | None,
        tell: Tell,
        counts: Counter[str],
    ) -> None:
        self._pool = pool
        self._index = index
        self._tracker = tracker
        self._tell = tell
        self._counts = counts

    def tell_guess(self, engine: Engine, hashes: bytes) -> None:
        """This router believes that `engine` holds these blocks, having sent it their tokens."""
        domain = domain_of(engine)
        if domain is None:
            return
        for at in range(0, len(hashes), MAX_PIECE_BLOCKS * _HASH_BYTES):
            ids = block_ids(hashes[at : at + MAX_PIECE_BLOCKS * _HASH_BYTES])
            self._tell(Guess(engine.address, domain, ids.tobytes()))

    def take_guess(self, guess: Guess) -> None:
        """Another router sent these blocks there."""
        engine = self._pool.target(guess.address)
        if engine is None or domain_of(engine) != guess.domain or len(guess.ids) % _ID_BYTES:
            self._counts["guesses_refused"] += 1
        elif not self._tells(engine):
            self._counts["guesses_taken"] += 1
            self._index.stored(engine, array("Q", guess.ids))
            if self._tracker is not None:
                self._tracker.guessed(engine)

    def snapshot(self) -> Iterator[Item | None]:
        """All that this router knows, in pieces; each as it is when it is taken.

        None where there was nothing in a step: others may have their turn then too.
        """
        for engine in tuple(self._pool.targets()):
            domain = domain_of(engine)
            if domain is not None and not self._tells(engine):
                for ids in self._pieces(engine):
                    yield Guess(engine.address, domain, ids) if ids else None

    def _pieces(self, engine: Engine) -> Iterator[bytes]:
        end: int | None = None
        while end != 0:
            end, ids = self._index.held(engine, end)
            for at in range(0, len(ids) or 1, MAX_PIECE_BLOCKS * _ID_BYTES):
                yield ids[at : at + MAX_PIECE_BLOCKS * _ID_BYTES]

    def _tells(self, engine: Engine) -> bool:
        """Whether it tells by events what it holds."""
        return self._tracker is not None and self._tracker.tells(engine)


def domain_of(engine: Engine) -> Domain | None:
    """What gives the ids of its blocks their meaning; None while it is not in the pool."""
    domain = engine.identity.domain if engine.identity is not None else None
    return Domain(domain.block_tokens, domain.root[:_ROOT_BYTES]) if domain is not None else None
