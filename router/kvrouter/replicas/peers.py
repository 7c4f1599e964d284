"""The other routers of the group and their load, which the pool adds to its own.

Synchronous, over an injected clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool
    from kvrouter.replicas.messages import State

FADED_S: Final = 2.0
"""An older load does not count: a router sends its state at least every second."""
GONE_S: Final = 5.0
"""A router that is silent for longer is gone."""
MAX_PEERS: Final = 64
"""Messages of further routers are refused."""
NO_PREFILLS: Final = (0, 0, 0)
Prefills = tuple[int, int, int]
"""Legs, tokens and estimated milliseconds."""


@dataclass(slots=True)
class Peer:
    """Another router.

    Attributes:
        id: of its process.
        name: for people.
        epoch: see `State.epoch`.
        number: of its last envelope.
        heard_s: when its last state arrived, on the clock.
        load: its tokens in flight by engine or rank.
        prefills: see `State.prefills`.
    """

    id: str
    name: str = ""
    epoch: int = -1
    number: int = 0
    heard_s: float = 0.0
    load: Mapping[str, int] = field(default_factory=dict)
    prefills: Mapping[str, Prefills] = field(default_factory=dict)


class Peers:
    """The last state of each router; the pool gets their tokens in flight on its engines."""

    def __init__(self, pool: EnginePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._peers: dict[str, Peer] = {}

    def __len__(self) -> int:
        """How many routers there are."""
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        """Each router, in the order in which they joined."""
        return iter(tuple(self._peers.values()))

    def find(self, router: str) -> Peer | None:
        """That router, if it has sent its state."""
        return self._peers.get(router)

    def update(self, router: str, state: State) -> Peer | None:
        """Take over the state of `router`; None if there are too many routers already."""
        peer = self._peers.get(router)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                return None
            peer = self._peers[router] = Peer(router)
        peer.name, peer.heard_s = state.name, self._clock()
        self._replace(peer, state.load, state.prefills)
        return peer

    def expire(self) -> list[Peer]:
        """Forget old loads, and routers that are gone; returns the latter."""
        now, gone = self._clock(), []
        for peer in self:
            age_s = now - peer.heard_s
            if age_s > FADED_S and (peer.load or peer.prefills):
                self._replace(peer, {}, {})
            if age_s > GONE_S:
                gone.append(self._peers.pop(peer.id))
        return gone

    def oldest_state_s(self) -> float:
        """Age of the state of the router that has been silent longest; 0 without routers."""
        now = self._clock()
        return max((now - peer.heard_s for peer in self._peers.values()), default=0.0)

    def engine_joined(self, engine: Engine) -> None:
        """Count what others already have on `engine`."""
        peers = self._peers.values()
        told = [peer.prefills.get(engine.address, NO_PREFILLS) for peer in peers]
        legs, tokens, work_ms = (sum(each) for each in zip(NO_PREFILLS, *told, strict=True))
        self._pool.set_remote_load(
            engine,
            sum(peer.load.get(engine.address, 0) for peer in peers),
            (legs, tokens, work_ms / 1000),
        )

    def _replace(
        self, peer: Peer, load: Mapping[str, int], prefills: Mapping[str, Prefills]
    ) -> None:
        changed = peer.load.items() ^ load.items() | peer.prefills.items() ^ prefills.items()
        peer.load, peer.prefills = load, prefills
        for address in {address for address, _ in changed}:
            engine = self._pool.target(address)
            if engine is not None:
                self.engine_joined(engine)
