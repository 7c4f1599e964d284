"""This router as a member of its group: publishes its state, and takes over that of the others.

Two tasks: one publishes every TICK_S, one receives. No request waits for either; an error in them
costs shared state only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from dataclasses import dataclass, field
from secrets import token_hex
from socket import gethostname
from typing import TYPE_CHECKING, Final

from kvrouter.prefix.index import PrefixIndex, block_ids
from kvrouter.prefix.learnt import PIECES
from kvrouter.redis.client import RETRY_S, RedisClient, RedisFailed
from kvrouter.replicas.changes import Changes, SharedFleet
from kvrouter.replicas.messages import (
    MAX_PIECE_BLOCKS,
    BadEnvelope,
    Change,
    Domain,
    Guess,
    Item,
    Outbox,
    SnapshotRequest,
    State,
    decode,
)
from kvrouter.routing.rendezvous import weight
from kvrouter.telemetry.series import Reading

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Mapping

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool
    from kvrouter.membership.fleet import Fleet
    from kvrouter.prefix.events.tracker import CacheTracker


TICK_S: Final = 0.005
"""Between two turns of the publisher. Other routers know this router's load with this delay, and
may send a leg to an engine that just got one (figures: `docs/replicas.md`)."""
HEARTBEAT_S: Final = 1.0  # between two states of a router, even if nothing has changed
REGISTERED_MS: Final = 5000  # life of a router's key in Redis after its last heartbeat
PIECES_PER_TURN: Final = 2  # of a snapshot; each costs up to half a millisecond
ASK_AGAIN_S: Final = 2.0  # least time between two requests for a snapshot to one router

log = logging.getLogger(__name__)


FADED_S: Final = 2.0  # an older load does not count: a router sends its state at least every second
GONE_S: Final = 5.0  # a router that is silent for longer is gone
MAX_PEERS: Final = 64  # messages of further routers are refused
NO_PREFILLS: Final = (0, 0, 0)
Prefills = tuple[int, int, int]  # legs, tokens and estimated milliseconds
_ROOT_BYTES: Final = 8
_ID_BYTES: Final = 8
_HASH_BYTES: Final = 32


@dataclass(slots=True)
class Peer:
    """Another router."""

    id: str  # of its process
    name: str = ""  # for people
    epoch: int = -1  # see `State.epoch`
    number: int = 0  # of its last envelope
    heard_s: float = 0.0  # when its last state arrived, on the clock
    load: Mapping[str, int] = field(default_factory=dict)  # its tokens in flight by engine or rank
    prefills: Mapping[str, Prefills] = field(default_factory=dict)  # see `State.prefills`


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


@dataclass(eq=False)
class Holdings:
    """Blocks that engines hold, as routers tell each other: sends guesses by `queue`.

    A router guesses what an engine without KV events holds, from the requests that it sends there.
    One that joins later, or missed a message, gets a snapshot in pieces. Engines with KV events are
    left out: each router receives their events itself.

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


@dataclass(eq=False)
class Group:
    """What this router shares. `start` it when its engines have been probed; `close` ends it."""

    redis: RedisClient  # not closed here
    prefix: str  # of every key and channel
    pool: EnginePool
    own_fleet: Fleet  # adds and removes engines, on this router alone
    index: PrefixIndex  # blocks that engines hold
    tracker: CacheTracker | None  # knows who publishes KV events; None: the router receives none
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic
    id: str = field(default_factory=lambda: token_hex(8), init=False)  # of this process
    name: str = field(default="", init=False)  # for people
    lag_s: float = field(default=0.0, init=False)  # of its own last message, until it arrived here

    def __post_init__(self) -> None:
        pool = self.pool
        self._key = f"{self.prefix}:router:{self.id}"
        self._all_routers = f"{self.prefix}:routers"
        self._inbox_of = f"{self.prefix}:router:{{}}".format
        self._outbox = Outbox(self.id, self._all_routers)
        self.counts = self._outbox.counts  # messages sent, received, lost and refused, by kind
        self.peers = Peers(pool, self.clock)  # the other routers
        self._changes = Changes(self.id)
        # For the admin API in place of `own_fleet`: other routers follow its changes.
        self.fleet = SharedFleet(self.own_fleet, pool, self._changes)
        # Receives the blocks that this router believes engines to hold.
        self.holdings = Holdings(pool, self.index, self.tracker, self._queue, self.counts)
        self._tasks: list[asyncio.Task[None]] = []
        self._snapshots: dict[str, Iterator[Item | None]] = {}
        self._asked_s: dict[str, float] = {}
        self._sent_load: tuple[dict[str, int], dict[str, Prefills]] = ({}, {})
        self._sent_changes: list[Change] = []
        self._heartbeat_s = 0.0
        self._sent_s: dict[int, float] = {}

    def start(self, port: int) -> None:
        """Begin to share; `port` is this router's own."""
        self.name = f"{gethostname()}:{port}"
        self.pool.on_join(self.peers.engine_joined)
        self._tasks.append(asyncio.create_task(self._publish(), name="replicas publish"))
        channels = (self._all_routers, self._inbox_of(self.id))
        receive = self.redis.listen(channels, self._take, self._subscribed)
        self._tasks.append(asyncio.create_task(receive, name="replicas receive"))

    async def close(self) -> None:
        """Leave the group; the others notice within a few seconds. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            with contextlib.suppress(RedisFailed):
                await self.redis.call("DEL", self._key)

    def readings(self) -> Iterator[Reading]:
        """Metrics of the group and its Redis."""
        yield Reading(
            "kvrouter:replicas",
            "Other routers of this group that sent a message within the last 5 s.",
            lambda: len(self.peers),
        )
        yield Reading(
            "kvrouter:replica_lag_seconds",
            "Time that the last message of this router took through Redis and back.",
            lambda: self.lag_s,
        )
        yield Reading(
            "kvrouter:replica_silence_seconds",
            "Time since the last state of the router that has been silent longest.",
            self.peers.oldest_state_s,
        )
        yield Reading(
            "kvrouter:replica_messages",
            "Messages to and from other routers, lost and refused ones too, by kind.",
            self.counts.items,
            ["kind"],
            grows=True,
        )
        yield Reading(
            "kvrouter:worker_tokens_elsewhere",
            "Tokens in flight on an engine from other routers of the group.",
            lambda: ((engine.address, engine.remote_tokens) for engine in self.pool.targets()),
            ["engine"],
        )
        yield Reading(
            "kvrouter:redis_connected",
            "Whether Redis answered the last command.",
            lambda: self.redis.connected,
        )
        yield Reading(
            "kvrouter:redis",
            "Connections to Redis, and commands that failed or were refused, by kind.",
            self.redis.counts.items,
            ["kind"],
            grows=True,
        )

    # -- publishing

    async def _publish(self) -> None:
        while True:
            try:
                await self._publish_once()
            except RedisFailed as error:
                log.debug("replicas: %s", error)
                self.counts["turns_lost"] += 1
                self._outbox.lost()
                self._heartbeat_s = 0.0  # send the whole state as soon as Redis is back
                await asyncio.sleep(RETRY_S)
            except Exception:  # shared state may be lost, but sharing must go on
                log.exception("replicas: a turn failed")
            await asyncio.sleep(TICK_S)

    async def _publish_once(self) -> None:
        now = self.clock()
        self.fleet.carry_out()
        self._expire()
        commands: list[tuple[str | bytes | int, ...]] = []
        if now >= self._heartbeat_s:
            commands.append(("SET", self._key, self.name, "PX", REGISTERED_MS))
        self._queue_state(now)
        self._queue_snapshots()
        commands += [("PUBLISH", *each) for each in self._outbox.messages()]
        if commands:
            self._sent_s = {self._outbox.number: now}
            await self.redis.batch(commands)

    def _queue_state(self, now: float) -> None:
        load = {
            engine.address: engine.tokens - engine.remote_tokens
            for engine in self.pool.targets()
            if engine.tokens != engine.remote_tokens
        }
        prefills = {
            engine.address: (legs, tokens, max(0, round(1000 * work_s)))
            for engine in self.pool.targets()
            for legs, tokens, work_s in (engine.prefilling.own,)
            if legs
        }
        changes = self._changes.all()
        due = now >= self._heartbeat_s
        if not due and (load, prefills) == self._sent_load and changes == self._sent_changes:
            return
        new = due or changes != self._sent_changes
        told = changes if new else None
        self._queue(State(self.name, self._outbox.epoch, load, told, prefills))
        self._sent_load, self._sent_changes = (load, prefills), changes
        if due:
            self._heartbeat_s = now + HEARTBEAT_S

    def _queue(self, item: Item, router: str | None = None) -> None:
        """Queue `item` for one router, or for all."""
        self._outbox.put(self._all_routers if router is None else self._inbox_of(router), item)

    def is_home(self, engine: Engine) -> bool:
        """Whether this router takes `engine` before others do: rendezvous, as of sessions."""
        name = engine.address.encode()
        return all(weight(name, peer.id) < weight(name, self.id) for peer in self.peers)

    def _queue_snapshots(self) -> None:
        """Queue some more pieces of the snapshots that others asked for, while there is room."""
        for router, pieces in tuple(self._snapshots.items()):
            for _ in range(PIECES_PER_TURN):
                if not self._outbox.room:
                    return
                try:
                    item = next(pieces)
                except StopIteration:
                    del self._snapshots[router]
                    break
                if item is not None:
                    self._queue(item, router)

    def _expire(self) -> None:
        for peer in self.peers.expire():
            log.info("router %s (%s) is gone", peer.name, peer.id)
            self._asked_s.pop(peer.id, None)
            self._snapshots.pop(peer.id, None)

    # -- receiving

    def _subscribed(self) -> None:
        """Earlier messages are lost: ask all routers for snapshots, and announce this router."""
        for peer in self.peers:
            peer.epoch, peer.number = -1, 0
        self._asked_s.clear()
        self._heartbeat_s = 0.0

    def _take(self, channel: str, message: bytes) -> None:
        """Take over one message. Never raises: wrong messages are counted."""
        del channel
        try:
            envelope = decode(message)
        except BadEnvelope as error:
            self.counts[f"refused_{error}"] += 1
            return
        if envelope.sender == self.id:
            sent_s = self._sent_s.get(envelope.number)
            if sent_s is not None:
                self.lag_s = self.clock() - sent_s
            return
        try:
            self._take_all(envelope.sender, envelope.number, envelope.items)
        except Exception:  # the next message may be right
            log.exception("replicas: a message of %s failed", envelope.sender)

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
                self.holdings.receive(item)
            elif isinstance(item, SnapshotRequest):
                self._begin_snapshot(sender)

    def _take_state(self, sender: str, state: State) -> None:
        new = self.peers.find(sender) is None
        peer = self.peers.update(sender, state)
        if peer is None:
            self.counts["refused_peers"] += 1
            return
        if new:
            log.info("router %s (%s) joined", peer.name, peer.id)
            self._heartbeat_s = 0.0
        if state.changes:
            self.counts["changes_taken"] += self.fleet.follow(state.changes)
        if peer.epoch != state.epoch:
            self._ask(peer, state.epoch)

    def _ask(self, peer: Peer, epoch: int) -> None:
        """Ask for a snapshot; if the last request is recent, one of the next states does it."""
        now = self.clock()
        if now - self._asked_s.get(peer.id, -ASK_AGAIN_S) >= ASK_AGAIN_S:
            self._asked_s[peer.id] = now
            peer.epoch = epoch
            self._queue(SnapshotRequest(), peer.id)

    def _begin_snapshot(self, router: str) -> None:
        """Send `router` a snapshot, from its beginning if one is in progress."""
        if self.peers.find(router) is not None:
            self.counts["snapshots"] += 1
            self._snapshots[router] = self.holdings.snapshot()
