"""The other routers, as they told of themselves: who is there, and what each has under way.

Synchronous, over an injected clock; the pool counts what they have under way with its own.
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
"""A load that is older counts no more: its router tells at least every second."""
GONE_S: Final = 5.0
"""A router that has said nothing for so long is gone."""
MAX_PEERS: Final = 64
"""Further ones are not listened to."""


@dataclass(slots=True)
class Peer:
    """Another router.

    Attributes:
        id: of its process.
        name: for people.
        epoch: see `State.epoch`.
        number: of the last envelope that came from it.
        heard_s: when it last told its state, on the clock.
        load: tokens under way from it, by engine or rank.
    """

    id: str
    name: str = ""
    epoch: int = -1
    number: int = 0
    heard_s: float = 0.0
    load: Mapping[str, int] = field(default_factory=dict)


class Peers:
    """Keeps the others' state and has the pool count their load.

    Args:
        pool: is told what others have under way on its engines.
        clock: seconds, monotonic.
    """

    def __init__(self, pool: EnginePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._peers: dict[str, Peer] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        """Each of them, the one that is known longest first."""
        return iter(tuple(self._peers.values()))

    def find(self, router: str) -> Peer | None:
        """That router, if it has told its state."""
        return self._peers.get(router)

    def told(self, router: str, state: State) -> Peer | None:
        """`router` is there, and has this under way; None where there are too many already."""
        peer = self._peers.get(router)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                return None
            peer = self._peers[router] = Peer(router)
        peer.name, peer.heard_s = state.name, self._clock()
        self._replace(peer, state.load)
        return peer

    def expire(self) -> list[Peer]:
        """Forget loads that are old and routers that are gone; returns the latter."""
        now, gone = self._clock(), []
        for peer in self:
            age_s = now - peer.heard_s
            if age_s > FADED_S and peer.load:
                self._replace(peer, {})
            if age_s > GONE_S:
                gone.append(self._peers.pop(peer.id))
        return gone

    def oldest_state_s(self) -> float:
        """How long ago that router told its state which has been silent longest; 0 without any."""
        now = self._clock()
        return max((now - peer.heard_s for peer in self._peers.values()), default=0.0)

    def engine_joined(self, engine: Engine) -> None:
        """What others already have under way on it counts."""
        self._pool.set_remote_tokens(engine, self._elsewhere(engine.address))

    def _replace(self, peer: Peer, load: Mapping[str, int]) -> None:
        before, peer.load = peer.load, load
        for address in before.keys() | load.keys():
            if before.get(address, 0) != load.get(address, 0):
                engine = self._pool.target(address)
                if engine is not None:
                    self._pool.set_remote_tokens(engine, self._elsewhere(address))

    def _elsewhere(self, address: str) -> int:
        return sum(peer.load.get(address, 0) for peer in self._peers.values())
