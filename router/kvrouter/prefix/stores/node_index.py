"""What nodes of the store hold, by their KV events: an index beside that of the engines.

Of a node of which anything may have been missed, it says nothing: that node is asked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.events.intake import EventIntake
from kvrouter.prefix.events.mapping import BlockNaming
from kvrouter.prefix.events.messages import AllBlocksCleared, BlockStored, Event, low_ids
from kvrouter.prefix.events.tracker import CacheTracker
from kvrouter.prefix.groups import known_loadable
from kvrouter.prefix.index import PrefixIndex
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from kvrouter.engines.engine import CacheGroup

ROOM: Final = 7 / 8  # while the index is fuller, no node is learnt again: it would overflow again
RELEARN_S: Final = 60.0
"""Between two nodes that are learnt again: each of them tells all that it holds."""
_NO_MODEL: Final = Identity(())


class NodeMapping:
    """Applies events of nodes to the index, where each manifest of a node is an engine."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._holders: dict[Engine, dict[str, Engine]] = {}

    def holders(self, node: Engine) -> Mapping[str, Engine]:
        """What holds the blocks of a node in the index, by the manifest's hex digest."""
        return self._holders.get(node, {})

    def is_foreign(self, engine: Engine, names: BlockNaming) -> bool:
        """See `EventMapping`: nodes name blocks as the router does."""
        return False

    def empty(self, engine: Engine, names: BlockNaming) -> None:
        """See `EventMapping`."""
        for holder in self._holders.pop(engine, {}).values():
            self._index.clear(holder)
        names.emptied()

    def apply(self, engine: Engine, names: BlockNaming, event: Event) -> bool:
        """See `EventMapping`."""
        if isinstance(event, AllBlocksCleared):
            self.empty(engine, names)
            return True
        manifest, ids = (event.manifest or b"").hex(), low_ids(event.block_hashes)
        holder = self.holders(engine).get(manifest)
        if isinstance(event, BlockStored):
            holder = holder or Engine(engine.address, Role.STORE)
            if manifest and self._index.stored(holder, ids):
                self._holders.setdefault(engine, {})[manifest] = holder
            else:
                names.unnamed = True
        elif holder is not None:
            self._index.removed(holder, ids)
        return False


@dataclass(eq=False)
class NodeIndex:
    """Listens to nodes on the running loop; its owner calls `tick` regularly, and `close`."""

    max_blocks: int  # that it remembers of all nodes together
    ports: Mapping[str, int]  # of the nodes' events, by `HOST:PORT`; under "" that of all others
    replay_ports: Mapping[str, int]  # the same of their replays
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic

    def __post_init__(self) -> None:
        self._index = PrefixIndex(self.max_blocks)
        self._relearn_at = 0.0
        self._mapping = NodeMapping(self._index)
        self._tracker = CacheTracker(
            self._index, lambda _: None, lambda _: None, clock=self.clock, mapping=self._mapping
        )
        self._intake = EventIntake(self._tracker, self.ports, self.replay_ports)
        self._nodes: dict[str, Engine] = {}  # what publishes, by URL

    @property
    def counts(self) -> Mapping[str, int]:
        """See `CacheTracker`."""
        return self._tracker.counts

    def follow(self, urls: Collection[str]) -> None:
        """Listen to these nodes from now on, and forget others."""
        for url in self._nodes.keys() - set(urls):
            node = self._nodes.pop(url)
            self._intake.forget(node)
            self._forget(node)
        for url in urls:
            address = url.partition("://")[2]
            if url not in self._nodes and not address.startswith("/"):
                node = self._nodes[url] = Engine(address, Role.STORE, identity=_NO_MODEL)
                self._tracker.engine_joined(node)
                self._intake.listen(node)

    def match(self, groups: Sequence[CacheGroup], hashes: bytes) -> dict[str, int]:
        """Leading blocks of a chain that an engine can load, at each node that is known, by URL."""

        @cache
        def runs(first: int, end: int) -> Mapping[Engine, int]:
            return self._index.match(hashes[first * HASH_BYTES : end * HASH_BYTES])

        def run(node: Engine, manifest: str, first: int, end: int) -> int:
            holder = self._mapping.holders(node).get(manifest)
            return 0 if holder is None else runs(first, end).get(holder, 0)

        return {
            url: known_loadable(partial(run, node), groups, len(hashes) // HASH_BYTES)
            for url, node in self._nodes.items()
            if self._tracker.confidence(node) is Reason.COMPLETE
        }

    def states(self) -> Iterator[tuple[str, Reason]]:
        """How well each node is known, by URL; it is asked unless the reason is COMPLETE."""
        return ((url, self._tracker.confidence(node)) for url, node in self._nodes.items())

    def tick(self) -> None:
        """Do what is due; to be called several times a second."""
        self._index.sweep()
        self._tracker.tick()
        if len(self._index) <= ROOM * self.max_blocks and self.clock() >= self._relearn_at:
            self._relearn_one()

    def close(self) -> None:
        """Close every socket. Idempotent."""
        self._intake.close()

    def _forget(self, node: Engine) -> None:
        self._mapping.empty(node, BlockNaming())
        self._tracker.forget(node)

    def _relearn_one(self) -> None:
        """Learn a node again of which blocks may have been forgotten, now that there is room."""
        for node in self._nodes.values():
            if self._tracker.confidence(node) is Reason.FULL:
                self._relearn_at = self.clock() + RELEARN_S
                self._forget(node)
                self._tracker.engine_joined(node)
                return
