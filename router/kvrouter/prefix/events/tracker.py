"""KV events of all engines -> the prefix index, and how well the router knows each engine's cache.

A publisher's `Sequencer` puts messages in order, and `BlockMapping` applies them. No sockets:
`intake` and `replay` bring messages, and the owner of the tracker calls `tick` now and then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvrouter.prefix.events.confidence import IndexState, Reason
from kvrouter.prefix.events.mapping import BlockMapping, BlockNaming, MappingTally, Naming
from kvrouter.prefix.events.messages import BadMessage, decode_batch, decode_sequence
from kvrouter.prefix.events.publisher import EngineCache, Publisher, Workings, settle
from kvrouter.prefix.events.reorder import Budget, Message
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrouter.engines.engine import Engine, HashDomain
    from kvrouter.prefix.events.publisher import ReplayRequests
    from kvrouter.prefix.index import PrefixIndex

TOPIC_PREFIX: Final = "kv@"
HELD_BYTES: Final = 64 << 20
"""Messages of all engines that are kept until those before them have come."""
SILENT_S: Final = 15.0
"""An engine that computed new blocks and tells nothing for so long is no longer believed."""
DEAD_S: Final = 60.0
"""And after so long what it told is forgotten, and guessed from the legs that it was sent."""
MAX_RANKS: Final = 1024
"""Publishers that one target may have."""
UNSURE_PROMPTS: Final = 8
"""Where not all that an engine holds is known, it may hold a prompt and so tell nothing of it:
only so many different ones are a sign."""


class CacheTracker:
    """Applies messages to the index and keeps count of what could not be applied.

    What an engine that left holds is learnt again from the beginning when it joins.

    Args:
        index: is told what engines hold.
        find: the engine of an address `HOST:PORT`, or None.
        domain: the hash domain of the router's own hashes now, or None while unknown.
        max_names: bound of the names kept per engine whose naming is MAPPED.
        clock: seconds, monotonic.

    Attributes:
        counts: messages, events, replayed, duplicates, gaps, restarts, lost (messages that nobody
            could replay), unanswered (replays), silent (engines that stopped telling), malformed,
            unknown_topic, unknown_rank, unknown_event, other_medium, other_group, foreign_names,
            unmapped_blocks: each only grows.
        budget: bytes of messages that are kept until those before them have come.
    """

    def __init__(
        self,
        index: PrefixIndex,
        find: Callable[[str], Engine | None],
        domain: Callable[[], HashDomain | None],
        max_names: int = 200_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._find = find
        self._clock = clock
        self.counts = MappingTally()
        self.budget = Budget(HELD_BYTES)
        claims = BlockMapping(index, domain, max_names, self.counts)
        self._with = Workings(index, claims, domain, self.counts, self.budget)
        self._sources: dict[Engine, EngineCache] = {}
        self._publishers: dict[tuple[Engine, int], Publisher] = {}

    def replay_with(self, replays: ReplayRequests) -> None:
        """Have missing messages repeated by `replays` from now on."""
        self._with.replays = replays

    # -- engines of the pool

    def engine_joined(self, engine: Engine) -> None:
        """Find out what it has told so far, where its publisher can be asked."""
        if self._with.replays is not None:
            publisher = self._publisher(engine.server, engine.event_rank)
            if publisher is not None:
                publisher.stream.begin(self._clock())

    def engine_left(self, engine: Engine) -> None:
        """Forget what it told; the index forgets the rest itself."""
        source = self._sources.get(engine)
        if source is not None:
            self._leave(source)
            source.names = BlockNaming()
            source.guessed = False
            self._heard(source)
            settle(source)

    def forget(self, engine: Engine) -> None:
        """`engine` will not come back."""
        source = self._sources.pop(engine, None)
        if source is not None:
            self._leave(source)

    # -- what is known

    def naming(self, engine: Engine) -> Naming | None:
        """How its events name blocks, or None if it never sent any."""
        source = self._sources.get(engine)
        return source.names.naming if source and source.standing is not Reason.NO_EVENTS else None

    def standing(self, engine: Engine) -> Reason:
        """How well its cache is known, and why not better."""
        source = self._sources.get(engine)
        if source is None:
            return Reason.NO_EVENTS
        if source.standing is Reason.COMPLETE and source.forgotten != self._index.forgotten:
            return Reason.FULL
        return source.standing

    def trusts(self, engine: Engine) -> bool:
        """Whether what the index says of it is held for certain."""
        source = self._sources.get(engine)
        return source is not None and source.standing.trusted

    def tells(self, engine: Engine) -> bool:
        """Whether it tells by events what it holds, so that nobody need guess."""
        source = self._sources.get(engine)
        return source is not None and source.standing.state is not IndexState.FALLBACK

    def guessed(self, engine: Engine) -> None:
        """The index was given guesses of it, which are to go when it tells by itself."""
        (self._sources.get(engine) or self._source(engine)).guessed = True

    def computed(self, engine: Engine, hashes: bytes) -> bool:
        """`engine` has computed these blocks (32 bytes each).

        Believed where it does not tell by events itself; where it does, it owes an event.

        Returns:
            whether it was believed.
        """
        source = self._sources.get(engine)
        if source is None:
            source = self._source(engine)
        if source.standing.state is IndexState.FALLBACK:
            source.guessed = True
            self._index.credit(engine, hashes)
            return True
        if source.owed_prompts < UNSURE_PROMPTS:
            last = hashes[-HASH_BYTES:]
            if last == source.owed or self._index.match(last).get(engine):
                return False
            if not source.owed_prompts:
                source.owed_since, source.told = self._clock(), source.messages()
            source.owed = last
            source.owed_prompts += 1
        return False

    # -- messages

    def receive(self, frames: Sequence[bytes]) -> None:
        """Take a message whose topic says who sent it. Never raises: what is wrong is counted."""
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
            self._malformed(error)
            return
        publisher = self._publisher(server, batch.rank)
        if publisher is not None:
            self.counts["messages"] += 1
            publisher.stream.receive(Message(sequence, frames[2], batch))

    def replayed(self, server: Engine, rank: int, sequence: int, payload: bytes) -> None:
        """Take a message that its publisher repeats. Never raises."""
        publisher = self._publishers.get((server, rank))
        if publisher is None:
            return
        try:
            batch = decode_batch(payload)
        except BadMessage as error:
            self._malformed(error)
            return
        self.counts["replayed"] += 1
        publisher.stream.replayed(Message(sequence, payload, batch))

    def replay_ended(self, server: Engine, rank: int) -> None:
        """The publisher has repeated all that it has."""
        publisher = self._publishers.get((server, rank))
        if publisher is not None:
            publisher.stream.replay_ended(self._clock())

    def replay_failed(self, server: Engine, rank: int) -> None:
        """The publisher did not answer, or not to the end."""
        publisher = self._publishers.get((server, rank))
        if publisher is not None:
            publisher.stream.replay_failed(self._clock())

    def cut(self, engine: Engine) -> None:
        """The connection to the publisher of `engine` broke."""
        publisher = self._publishers.get((engine.server, engine.event_rank))
        if publisher is not None:
            publisher.stream.cut()

    def linked(self, engine: Engine) -> None:
        """The connection to the publisher of `engine` is there."""
        if self._with.replays is None or engine.identity is None:
            return
        publisher = self._publisher(engine.server, engine.event_rank)
        if publisher is not None:
            publisher.stream.check(self._clock())

    def tick(self) -> None:
        """Do what is due; to be called several times a second."""
        now = self._clock()
        for source in self._sources.values():
            for stream in source.streams:
                stream.tick(now)
            if source.owed_prompts:
                self._collect(source, now)
            if source.names.dropped:
                source.names.dropped = False
                for stream in source.streams:
                    stream.relearn(now)
            settle(source)

    # -- inside

    def _publisher(self, server: Engine, rank: int) -> Publisher | None:
        """The publisher of a rank; None, and counted, where the engine has none such."""
        known = self._publishers.get((server, rank))
        if known is not None:
            return known
        engine = server.rank_of_events(rank)
        source = None if engine is None else self._sources.get(engine) or self._source(engine)
        if source is None or len(source.streams) >= MAX_RANKS:
            message = "KV events of %s: it has no data-parallel rank %d"
            self.counts.warn("unknown_rank", message, server.address, rank)
            return None
        made = self._publishers[server, rank] = Publisher(self._with, source, server, rank)
        return made

    def _leave(self, source: EngineCache) -> None:
        for stream in source.streams:
            stream.reset()
        source.streams = []
        self._publishers = {k: e for k, e in self._publishers.items() if e.source is not source}

    def _source(self, engine: Engine) -> EngineCache:
        made = self._sources[engine] = EngineCache(engine, self._index.forgotten)
        return made

    def _sender(self, topic: bytes) -> Engine | None:
        name = topic.decode()
        address = name.removeprefix(TOPIC_PREFIX).partition("@")[0]
        engine = self._find(address) if name.startswith(TOPIC_PREFIX) else None
        if engine is None:
            self.counts.warn(
                "unknown_topic",
                "KV events: topic %.200r names no engine of this router; set it to kv@HOST:PORT as "
                "under --prefill and --decode",
                name,
            )
        return engine

    def _malformed(self, error: ValueError) -> None:
        self.counts.warn("malformed", "KV events: malformed message (%s)", error)

    def _heard(self, source: EngineCache) -> None:
        source.owed, source.owed_prompts = b"", 0
        source.silent = source.dead = False

    def _collect(self, source: EngineCache, now: float) -> None:
        """Has it told of what it computed? If not: is it still there?"""
        if source.messages() != source.told:
            self._heard(source)
            return
        owing_s = now - source.owed_since
        sure = self.standing(source.engine) is Reason.COMPLETE
        if source.silent:
            if owing_s >= DEAD_S and not source.dead:
                source.dead = source.guessed = True
        elif owing_s >= SILENT_S and (sure or source.owed_prompts >= UNSURE_PROMPTS):
            asked = [stream.check(now) for stream in source.streams]
            if all(asked) and not any(stream.unverified for stream in source.streams):
                source.owed_prompts = 0  # its answer tells whether anything is missing
            else:
                source.silent = True
                self.counts["silent"] += 1
