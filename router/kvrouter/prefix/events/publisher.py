"""One engine's cache by its KV events: its publishers, and how well the cache is known."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvrouter.prefix.events.confidence import IndexState, Reason
from kvrouter.prefix.events.mapping import BlockNaming, Naming
from kvrouter.prefix.events.sequencer import Sequencer

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.prefix.events.messages import Event
    from kvrouter.prefix.events.sequencer import Message
    from kvrouter.prefix.events.tracker import CacheTracker

log = logging.getLogger(__name__)


class ReplayRequests(Protocol):
    """Asks publishers to repeat messages."""

    def ask(self, server: Engine, rank: int, start: int) -> bool:
        """Request a replay in place of the one before; False: no publisher is known.

        Answers go to `CacheTracker.replayed`, `replay_ended` and `replay_failed`.
        """


@dataclass(slots=True, eq=False)
class EngineCache:
    """What is known of the cache of one engine, or of one of its data-parallel ranks."""

    engine: Engine
    forgotten: int  # `PrefixIndex.forgotten` when the cache was last known to be empty
    names: BlockNaming = field(default_factory=BlockNaming)
    streams: list[Sequencer] = field(default_factory=list)  # one, unless ranks share a target
    confidence: Reason = Reason.NO_EVENTS
    guessed: bool = False  # whether the index holds guesses of it
    owed: bytes = b""  # the last block of a computed prompt without an event so far
    owed_since: float = 0.0  # when the first such prompt was computed
    owed_prompts: int = 0  # number of such prompts
    heard_s: float | None = None  # when its last message came, on the clock; None: none came
    told: int = 0  # `messages()` at `owed_since`
    silent: bool = False  # whether events are overdue
    dead: bool = False  # whether they are so long overdue that none are expected

    def messages(self) -> int:
        """A number that changes with each applied message."""
        return sum(stream.next or 0 for stream in self.streams)

    def reported(self) -> None:
        """The engine sent an event: it owes none."""
        self.owed, self.owed_prompts = b"", 0
        self.silent = self.dead = False

    def update(self) -> None:
        """Find how well it is known now; log a change."""
        before, now = self.confidence, self._confidence()
        self.confidence = now
        if now is before:
            return
        level = logging.WARNING if now.state is not IndexState.EXACT else logging.INFO
        if now is Reason.NO_EVENTS or Reason.GAP in (before, now):
            level = logging.INFO  # a gap is logged when it opens
        log.log(
            level,
            "KV index of %s: %s (%s), was %s (%s)",
            self.engine.address,
            now.state.upper(),
            now,
            before.state.upper(),
            before,
        )

    def _confidence(self) -> Reason:
        """The worst reason that holds."""
        reasons = {stream.reason for stream in self.streams}
        for holds, reason in (
            (self.dead, Reason.DEAD),
            (reasons <= {Reason.NO_EVENTS}, Reason.NO_EVENTS),
            (self.names.naming is Naming.FOREIGN, Reason.FOREIGN),
            (self.names.uncounted, Reason.UNCOUNTED),
            (Reason.GAP in reasons, Reason.GAP),
            (Reason.CUT in reasons, Reason.CUT),
            (len(self.streams) > 1, Reason.RANKS),
            (self.silent, Reason.SILENT),
            (self.names.ahead, Reason.LOOKAHEAD),
            (Reason.LOST in reasons, Reason.LOST),
            (Reason.LATE in reasons, Reason.LATE),
            (self.names.unnamed, Reason.UNNAMED),
        ):
            if holds:
                return reason
        return Reason.COMPLETE


class Publisher:
    """One publisher of an engine; it acts on the messages that its sequencer has put in order."""

    __slots__ = ("_tracker", "cache", "rank", "server", "stream")

    def __init__(
        self, tracker: CacheTracker, cache: EngineCache, server: Engine, rank: int
    ) -> None:
        self._tracker = tracker
        self.cache = cache
        self.server = server
        self.rank = rank
        self.stream = Sequencer(self, tracker.budget, tracker.clock)
        cache.streams.append(self.stream)

    def apply(self, message: Message) -> None:
        """Apply the next message, when its turn comes."""
        if self.cache.guessed:
            self._drop_guesses()
        self.cache.heard_s = self._tracker.clock()
        self._tracker.apply(self, message.batch)

    def act(self, event: Event | None) -> None:
        """Apply an event; None is one of an unknown kind."""
        tracker, cache = self._tracker, self.cache
        if event is None:
            tracker.counts["unknown_event"] += 1
            return
        tracker.counts["events"] += 1
        uncounted = cache.names.uncounted
        if tracker.blocks.apply(cache.engine, cache.names, event):
            self._emptied()
        if cache.names.uncounted is not uncounted:
            cache.guessed = cache.guessed and cache.names.uncounted
            cache.update()

    def forget(self) -> None:
        """Forget what the messages so far established."""
        cache = self.cache
        self._tracker.drop(self)
        self._tracker.blocks.empty(cache.engine, cache.names)
        cache.forgotten = self._tracker.index.forgotten
        cache.guessed = False
        for stream in cache.streams:
            if stream is not self.stream:
                stream.complete, stream.missing = False, Reason.LOST

    def ask(self, start: int) -> bool:
        """Request a replay from `start` on, in place of one in flight; False: it cannot be asked.

        `Sequencer.replayed`, `replay_ended` or `replay_failed` follow, never from within this call.
        """
        replays = self._tracker.replays
        return replays is not None and replays.ask(self.server, self.rank, start)

    def count(self, kind: str, first: int, last: int) -> None:
        """Count `duplicates`, `gaps`, `restarts`, `lost` (first to last number) or `unanswered`."""
        self._tracker.counts[kind] += last - first + 1 if kind == "lost" else 1
        text = {
            "gaps": "messages %d to %d are missing",
            "restarts": "publisher restarted (message %d, expected %d)",
            "lost": "messages %d to %d are lost: its part of the index is rebuilt",
            "unanswered": "its publisher does not replay messages from %d on",
        }.get(kind)
        if text is not None:
            numbers = (first, last)[: text.count("%d")]
            log.warning(f"KV events of %s: {text}", self.cache.engine.address, *numbers)

    def changed(self) -> None:
        """`Sequencer.reason` may have changed."""
        self.cache.update()

    def _emptied(self) -> None:
        """The engine holds nothing: from here on all is known."""
        cache = self.cache
        cache.forgotten = self._tracker.index.forgotten
        for stream in cache.streams:
            stream.complete = stream is self.stream
        cache.update()

    def _drop_guesses(self) -> None:
        """Events replace guesses, unless they cannot be mapped."""
        cache, blocks = self.cache, self._tracker.blocks
        if blocks.is_foreign(cache.engine, cache.names):
            return
        blocks.empty(cache.engine, cache.names)
        cache.guessed = False
        if cache.dead:  # its earlier events were among the guesses
            cache.names.dropped = True
            for stream in cache.streams:
                stream.complete, stream.missing = False, Reason.LATE
