"""This router among those of its group: tells them what it knows, and takes in what they tell.

Two tasks: one talks, every TICK_S; one listens. Neither is ever waited for, and what goes wrong in
them costs what is shared, not a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from secrets import token_hex
from socket import gethostname
from typing import TYPE_CHECKING, Final

from kvrouter.redis.connection import RedisRefused, RedisUnavailable
from kvrouter.replicas.changes import Changes, SharedFleet
from kvrouter.replicas.holdings import Holdings
from kvrouter.replicas.messages import (
    Ask,
    BadEnvelope,
    Guess,
    State,
    decode,
)
from kvrouter.replicas.outbox import Outbox
from kvrouter.replicas.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrouter.engines.pool import EnginePool
    from kvrouter.membership.fleet import Fleet
    from kvrouter.prefix.events.tracker import CacheTracker
    from kvrouter.prefix.index import PrefixIndex
    from kvrouter.redis.connection import RedisLink
    from kvrouter.replicas.messages import Change, Item
    from kvrouter.replicas.peers import Peer

TICK_S: Final = 0.005
"""Between two looks at what is to be told: so old is what others know of this router's load, and
so many legs go where another router has just sent one (`docs/replicas.md` has the figures)."""
HEARTBEAT_S: Final = 1.0
"""A router tells its state so often, also where nothing has changed."""
REGISTERED_MS: Final = 5000
"""Its key in Redis lives so much longer than its last heartbeat."""
PIECES_PER_TURN: Final = 2
"""Of a snapshot: each is up to half a millisecond's work."""
ASK_AGAIN_S: Final = 2.0
"""The same router is not asked more often what engines hold."""

log = logging.getLogger(__name__)


class Group:
    """What this router shares. `start` when its engines have been asked; `close` ends it.

    Args:
        redis: asked and listened to; not closed here.
        prefix: begins every key and channel.
        pool: its engines.
        fleet: changes which there are.
        index: what engines hold.
        tracker: who tells of its own cache, or None where no events are taken.
        clock: seconds, monotonic.

    Attributes:
        id: of this process.
        name: for people.
        redis: what it shares over.
        fleet: to be changed by the admin API instead of the one given: the others follow.
        holdings: takes what this router believes engines to hold.
    """

    def __init__(
        self,
        redis: RedisLink,
        prefix: str,
        *,
        pool: EnginePool,
        fleet: Fleet,
        index: PrefixIndex,
        tracker: CacheTracker | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = token_hex(8)
        self.name = ""
        self.redis = redis
        self._clock = clock
        self._key = f"{prefix}:router:{self.id}"
        self._everybody = f"{prefix}:routers"
        self._inbox_of = f"{prefix}:router:{{}}".format
        self._pool = pool
        self.outbox = Outbox(self.id, self._everybody)
        self.counts = self.outbox.counts
        self.peers = Peers(pool, clock)
        self._changes = Changes(self.id)
        self.fleet = SharedFleet(fleet, pool, self._changes)
        self.holdings = Holdings(pool, index, tracker, self._tell, self.counts)
        self._tasks: list[asyncio.Task[None]] = []
        self._snapshots: dict[str, Iterator[Item | None]] = {}
        self._asked_s: dict[str, float] = {}
        self._told_load: dict[str, int] = {}
        self._told_changes: list[Change] = []
        self._heartbeat_s = 0.0
        self._sent_s: dict[int, float] = {}
        self.lag_s = 0.0

    def start(self, port: int) -> None:
        """Begin to share; `port` is this router's own."""
        self.name = f"{gethostname()}:{port}"
        self._pool.on_join(self.peers.engine_joined)
        self._tasks.append(asyncio.create_task(self._talk(), name="replicas talk"))
        self._tasks.append(asyncio.create_task(self._listen(), name="replicas listen"))

    async def close(self) -> None:
        """Leave the group; the others forget this router in a few seconds. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            with contextlib.suppress(RedisUnavailable, RedisRefused):
                await self.redis.call("DEL", self._key)

    # -- talking

    async def _talk(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
            except Exception:  # what is shared may be lost, sharing may not end
                log.exception("replicas: a turn failed")

    async def tick(self) -> None:
        """Tell what is to be told now."""
        now = self._clock()
        self._expire()
        commands: list[tuple[str | bytes | int, ...]] = []
        if now >= self._heartbeat_s:
            commands.append(("SET", self._key, self.name, "PX", REGISTERED_MS))
        self._tell_state(now)
        self._tell_pieces()
        commands += [("PUBLISH", *letter) for letter in self.outbox.letters()]
        if not commands:
            return
        self._sent_s = {self.outbox.number: now}
        try:
            await self.redis.batch(commands)
        except (RedisUnavailable, RedisRefused) as error:
            log.debug("replicas: %s", error)
            self.counts["turns_lost"] += 1
            self.outbox.lost()
            self._heartbeat_s = 0.0  # tell it all again as soon as somebody takes it

    def _tell_state(self, now: float) -> None:
        load = {
            engine.address: engine.tokens - engine.remote_tokens
            for engine in self._pool.targets()
            if engine.tokens != engine.remote_tokens
        }
        changes = self._changes.all()
        due = now >= self._heartbeat_s
        if not due and load == self._told_load and changes == self._told_changes:
            return
        state = State(self.name, self.outbox.epoch, load)
        if due or changes != self._told_changes:
            state = State(self.name, self.outbox.epoch, load, changes)
        self._tell(state)
        self._told_load, self._told_changes = load, changes
        if due:
            self._heartbeat_s = now + HEARTBEAT_S

    def _tell(self, item: Item, router: str | None = None) -> None:
        """Queue `item` for one router, or for all."""
        self.outbox.put(self._everybody if router is None else self._inbox_of(router), item)

    def _expire(self) -> None:
        for peer in self.peers.expire():
            log.info("router %s (%s) is gone", peer.name, peer.id)
            self._asked_s.pop(peer.id, None)
            self._snapshots.pop(peer.id, None)

    # -- listening

    async def _listen(self) -> None:
        channels = (self._everybody, self._inbox_of(self.id))
        await self.redis.listen(channels, self.take, self._begins)

    def _begins(self) -> None:
        """What was said until now is lost: ask everybody, and let them know that we are here."""
        for peer in self.peers:
            peer.epoch, peer.number = -1, 0
        self._asked_s.clear()
        self._heartbeat_s = 0.0

    def take(self, channel: str, message: bytes) -> None:
        """Take in one message. Never raises: what is wrong is counted."""
        del channel
        try:
            envelope = decode(message)
        except BadEnvelope as error:
            self.counts[f"refused_{error}"] += 1
            return
        if envelope.sender == self.id:
            sent_s = self._sent_s.get(envelope.number)
            if sent_s is not None:
                self.lag_s = self._clock() - sent_s
            return
        try:
            self._take_all(envelope.sender, envelope.number, envelope.items)
        except Exception:  # the next message may be a good one
            log.exception("replicas: a message of %s could not be taken", envelope.sender)

    def _take_all(self, sender: str, number: int, items: list[Item]) -> None:
        peer = self.peers.find(sender)
        if peer is not None and number:
            if number != peer.number + 1 and peer.number:
                self.counts["missed_envelopes"] += 1
                peer.epoch = -1
            peer.number = number
        for item in items:
            if isinstance(item, State):
                self._take_state(sender, item)
            elif isinstance(item, Guess):
                self.holdings.take_guess(item)
            elif isinstance(item, Ask):
                self._answer(sender)

    def _take_state(self, sender: str, state: State) -> None:
        new = self.peers.find(sender) is None
        peer = self.peers.told(sender, state)
        if peer is None:
            self.counts["refused_peers"] += 1
            return
        if new:
            log.info("router %s (%s) is there", peer.name, peer.id)
            self._heartbeat_s = 0.0
        if state.changes:
            self.counts["changes_taken"] += self.fleet.follow(state.changes)
        if peer.epoch != state.epoch:
            self._ask(peer, state.epoch)

    def _ask(self, peer: Peer, epoch: int) -> None:
        """Ask `peer` for all, unless that was done a moment ago: then at one of its next states."""
        now = self._clock()
        if now - self._asked_s.get(peer.id, -ASK_AGAIN_S) >= ASK_AGAIN_S:
            self._asked_s[peer.id] = now
            peer.epoch = epoch
            self._tell(Ask(), peer.id)

    def _answer(self, router: str) -> None:
        """Tell `router` what engines hold, from the beginning where it asks again."""
        if self.peers.find(router) is not None:
            self.counts["snapshots"] += 1
            self._snapshots[router] = self.holdings.snapshot()

    def _tell_pieces(self) -> None:
        """Some more of what was asked for, as there is room."""
        for router, pieces in tuple(self._snapshots.items()):
            for _ in range(PIECES_PER_TURN):
                if not self.outbox.room:
                    return
                try:
                    item = next(pieces)
                except StopIteration:
                    del self._snapshots[router]
                    break
                if item is not None:
                    self._tell(item, router)
