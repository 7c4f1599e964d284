"""KV events of all engines: applied to the prefix index, and how well each cache is known.

A publisher's `Sequencer` orders its messages, `BlockMapping` applies them. No sockets: `intake`
brings messages, and the owner of the tracker calls `tick` regularly.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.prefix.events.confidence import IndexState, Reason
from kvrouter.prefix.events.mapping import BlockMapping, BlockNaming, EventCounts, Naming
from kvrouter.prefix.events.messages import BadMessage, TooLarge, decode_batch, decode_sequence
from kvrouter.prefix.events.publisher import EngineCache, Publisher, ReplayRequests
from kvrouter.prefix.events.sequencer import Budget, Message
from kvrouter.prefix.lower import Held, LowerTiers
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvrouter.engines.engine import Engine, HashDomain
    from kvrouter.prefix.events.mapping import EventMapping
    from kvrouter.prefix.events.messages import Batch, Event
    from kvrouter.prefix.events.sequencer import Sequencer
    from kvrouter.prefix.index import PrefixIndex

TOPIC_PREFIX: Final = "kv@"
TURN_S: Final = 0.002
HELD_BYTES: Final = 64 << 20  # messages of all engines that wait for earlier ones
SILENT_S: Final = 15.0
"""After so long without an event for computed blocks an engine's events are not trusted."""
DEAD_S: Final = 60.0  # after so long they are replaced by guesses from the legs that it was sent
MAX_RANKS: Final = 1024  # publishers of one target
UNSURE_PROMPTS: Final = 8
"""If its cache is not fully known, an engine may hold a prompt and so send no event: only so many
different prompts without one are a sign."""


@dataclass(eq=False)
class CacheTracker:
    """Applies messages to the index, and counts those that it cannot apply."""

    index: PrefixIndex  # of the engines' blocks
    find: Callable[[str], Engine | None]  # returns the engine of an address `HOST:PORT`
    # Returns the hash domain of the router's own hashes for an engine; None: unknown.
    domain: Callable[[Engine], HashDomain | None]
    max_names: int = 200_000  # bound of the names kept per engine whose naming is MAPPED
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic
    mapping: EventMapping | None = None  # None: that of engines
    # What engines hold below their own caches.
    lower: LowerTiers = field(default_factory=lambda: LowerTiers(1024))

    def __post_init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None  # called when `work` is to be called soon
        # Messages, events, replayed, duplicates, gaps, restarts, lost (messages), unanswered and
        # unasked (replays), silent (engines), malformed, too_large, unknown_topic, unknown_rank,
        # unknown_event, other_group, foreign_names, unmapped_blocks; each only grows.
        self.counts = EventCounts()
        self.budget = Budget(HELD_BYTES)  # bytes of messages that wait for earlier ones
        self.blocks: EventMapping = self.mapping or BlockMapping(
            self.index, self.domain, self.max_names, self.counts, self.lower
        )
        self._waiting: deque[tuple[Publisher, Iterator[Event | None]]] = deque()
        self.replays: ReplayRequests | None = None  # repeats missing messages; None: nobody does
        self._caches: dict[Engine, EngineCache] = {}
        self._publishers: dict[tuple[Engine, int], Publisher] = {}

    # -- engines of the pool

    def engine_joined(self, engine: Engine) -> None:
        """Request the events so far, if its publisher can be asked."""
        if self.replays is not None:
            publisher = self._publisher(engine.server, engine.event_rank)
            if publisher is not None:
                publisher.stream.begin()

    def engine_left(self, engine: Engine) -> None:
        """Forget its events, and what they told."""
        cache = self._caches.get(engine)
        if cache is not None:
            self._drop_streams(cache)
            self.blocks.empty(engine, cache.names)
            cache.names = BlockNaming()
            cache.guessed = False
            cache.reported()
            cache.update()

    def forget(self, engine: Engine) -> None:
        """`engine` will not come back."""
        cache = self._caches.pop(engine, None)
        if cache is not None:
            self._drop_streams(cache)
            self.blocks.empty(engine, cache.names)

    # -- what is known

    def naming(self, engine: Engine) -> Naming | None:
        """How its events name blocks; None: it sent none."""
        cache = self._caches.get(engine)
        return cache.names.naming if cache and cache.confidence is not Reason.NO_EVENTS else None

    def confidence(self, engine: Engine) -> Reason:
        """How well its cache is known, and why not better."""
        cache = self._caches.get(engine)
        if cache is None:
            return Reason.NO_EVENTS
        if cache.confidence is Reason.COMPLETE and cache.forgotten != self.index.forgotten:
            return Reason.FULL
        return cache.confidence

    def trusts(self, engine: Engine) -> bool:
        """Whether it certainly holds its blocks of the index."""
        cache = self._caches.get(engine)
        return cache is not None and cache.confidence.trusted

    def held(self, hashes: bytes) -> Held:
        """What engines have of a chain. Of those that it does not trust all are guesses."""
        found = self.index.match(hashes)
        own = {engine: blocks for engine, blocks in found.items() if self.trusts(engine)}
        guesses = {engine: blocks for engine, blocks in found.items() if engine not in own}
        lower = self.lower.match(hashes, found)
        return Held(own, guesses, {e: each for e, each in lower.items() if self.trusts(e)})

    def reports(self, engine: Engine) -> bool:
        """Whether its events are used, so that guesses are not needed."""
        cache = self._caches.get(engine)
        return cache is not None and cache.confidence.state is not IndexState.FALLBACK

    def guessed(self, engine: Engine) -> None:
        """The index was given guesses of it, which its first event replaces."""
        (self._caches.get(engine) or self._cache(engine)).guessed = True

    def heard_s(self, engine: Engine) -> float | None:
        """When its last KV event came, on the tracker's clock; None: none came since it joined."""
        cache = self._caches.get(engine)
        return cache.heard_s if cache is not None else None

    def computed(self, engine: Engine, hashes: bytes, block_tokens: int) -> bool:
        """`engine` has computed these blocks (32 bytes each): an event is due, or this is a guess.

        Returns whether the index was given them as a guess.
        """
        cache = self._caches.get(engine) or self._cache(engine)
        if cache.confidence.state is IndexState.FALLBACK:
            cache.guessed = True
            self.index.guess(engine, hashes, block_tokens)
            return True
        if cache.owed_prompts < UNSURE_PROMPTS:
            last = hashes[-HASH_BYTES:]
            if last == cache.owed or self.index.match(last).get(engine):
                return False
            if not cache.owed_prompts:
                cache.owed_since, cache.told = self.clock(), cache.messages()
            cache.owed = last
            cache.owed_prompts += 1
        return False

    def stream(self, server: Engine, rank: int) -> Sequencer | None:
        """The message order of a publisher; None: it is unknown."""
        publisher = self._publishers.get((server, rank))
        return publisher.stream if publisher is not None else None

    # -- messages

    def receive(self, frames: Sequence[bytes]) -> None:
        """Take a message whose topic names its sender. Never raises: defects are counted."""
        try:
            server = self._sender(frames[0]) if len(frames) == 3 else None
        except UnicodeDecodeError as error:
            self._malformed(error)
            return
        if server is not None or len(frames) != 3:
            self.receive_from(server, frames)

    def receive_from(self, server: Engine | None, frames: Sequence[bytes]) -> None:
        """Take a message of `server`, whatever its topic. Never raises."""
        try:
            if len(frames) != 3 or server is None:
                raise BadMessage(f"{len(frames)} frames")
            sequence, batch = decode_sequence(frames[1]), decode_batch(frames[2])
        except BadMessage as error:
            self._malformed(error, server)
            return
        publisher = self._publisher(server, batch.rank)
        if publisher is not None:
            self.counts["messages"] += 1
            publisher.stream.receive(Message(sequence, frames[2], batch))
            self.work()

    def apply(self, publisher: Publisher, batch: Batch) -> None:
        """Apply a message after those that wait, a few milliseconds at a time."""
        self._waiting.append((publisher, batch.pieces()))

    def drop(self, publisher: Publisher) -> None:
        """Forget the messages of `publisher` that are still to be applied."""
        self._waiting = deque(each for each in self._waiting if each[0] is not publisher)

    def work(self) -> bool:
        """Apply messages for TURN_S; returns whether any is left, to be called again.

        What waits is bounded by the callers: they take no message while any is left, so that there
        is one, and those that it released (see `Budget`).
        """
        until = self.clock() + TURN_S
        while self._waiting:
            publisher, pieces = self._waiting[0]
            for piece in pieces:
                publisher.act(piece)
                if self.clock() > until:
                    self.wake()
                    return True
            if self._waiting and self._waiting[0][1] is pieces:
                self._waiting.popleft()
        return False

    def replayed(self, server: Engine, rank: int, sequence: int, payload: bytes) -> None:
        """Take a message of a replay. Never raises."""
        if (stream := self.stream(server, rank)) is None:
            return
        try:
            batch = decode_batch(payload)
        except BadMessage as error:
            self._malformed(error, server)
            return
        self.counts["replayed"] += 1
        stream.replayed(Message(sequence, payload, batch))
        self.work()

    def replay_ended(self, server: Engine, rank: int) -> None:
        """The publisher has repeated all that it keeps."""
        if (stream := self.stream(server, rank)) is not None:
            stream.replay_ended()
            self.work()

    def replay_failed(self, server: Engine, rank: int) -> None:
        """The publisher did not answer, or not to the end."""
        if (stream := self.stream(server, rank)) is not None:
            stream.replay_failed()
            self.work()

    def disconnected(self, engine: Engine) -> None:
        """The connection to the publisher of `engine` broke."""
        if (stream := self.stream(engine.server, engine.event_rank)) is not None:
            stream.cut()

    def connected(self, engine: Engine) -> None:
        """The connection to the publisher of `engine` is there."""
        if self.replays is not None and engine.identity is not None:
            publisher = self._publisher(engine.server, engine.event_rank)
            if publisher is not None:
                publisher.stream.check()

    def tick(self) -> None:
        """Do what is due; to be called several times a second."""
        for cache in self._caches.values():
            for stream in cache.streams:
                stream.tick()
            if cache.owed_prompts:
                self._check_owed(cache)
            if cache.names.dropped:
                cache.names.dropped = False
                for stream in cache.streams:
                    stream.relearn()
            cache.update()
        for index in self.lower.indexes.values():
            index.sweep()
        self.work()

    # -- inside

    def _publisher(self, server: Engine, rank: int) -> Publisher | None:
        """The publisher of a rank; None, and counted: the engine has no such rank."""
        known = self._publishers.get((server, rank))
        if known is not None:
            return known
        engine = server.rank_of_events(rank)
        cache = None if engine is None else self._caches.get(engine) or self._cache(engine)
        if cache is None or len(cache.streams) >= MAX_RANKS:
            message = "KV events of %s: it has no data-parallel rank %d"
            self.counts.warn("unknown_rank", message, server.address, rank)
            return None
        made = self._publishers[server, rank] = Publisher(self, cache, server, rank)
        return made

    def _cache(self, engine: Engine) -> EngineCache:
        made = self._caches[engine] = EngineCache(engine, self.index.forgotten)
        return made

    def _drop_streams(self, cache: EngineCache) -> None:
        for stream in cache.streams:
            stream.reset()
        cache.streams, cache.heard_s = [], None
        for key, publisher in tuple(self._publishers.items()):
            if publisher.cache is cache:
                self.drop(publisher)
                del self._publishers[key]

    def _sender(self, topic: bytes) -> Engine | None:
        name = topic.decode()
        address = name.removeprefix(TOPIC_PREFIX).partition("@")[0]
        engine = self.find(address) if name.startswith(TOPIC_PREFIX) else None
        if engine is None:
            self.counts.warn(
                "unknown_topic",
                "KV events: topic %.200r names no engine of this router; set it to kv@HOST:PORT as "
                "under --prefill and --decode",
                name,
            )
        return engine

    def _malformed(self, error: ValueError, server: Engine | None = None) -> None:
        """Count a message that is dropped: of its publishers, if known, something is missing."""
        sender = server.address if server is not None else "an unknown sender"
        kind = "too_large" if isinstance(error, TooLarge) else "malformed"
        self.counts.warn(kind, "KV events of %s: a message is dropped (%s)", sender, error)
        for publisher in self._publishers.values():
            if publisher.server is server:
                publisher.stream.cut()

    def _check_owed(self, cache: EngineCache) -> None:
        """Has the engine sent an event for what it computed? If not, is its publisher alive?"""
        if cache.messages() != cache.told:
            cache.reported()
            return
        owing_s = self.clock() - cache.owed_since
        sure = self.confidence(cache.engine) is Reason.COMPLETE
        if cache.silent:
            if owing_s >= DEAD_S and not cache.dead:
                cache.dead = cache.guessed = True
        elif owing_s >= SILENT_S and (sure or cache.owed_prompts >= UNSURE_PROMPTS):
            asked = [stream.check() for stream in cache.streams]
            if all(asked) and not any(stream.unverified for stream in cache.streams):
                cache.owed_prompts = 0  # the answer shows whether anything is missing
            else:
                cache.silent = True
                self.counts["silent"] += 1
