"""One engine as its KV events show it: its publishers, how well it is known, and what changes that.

`kvrouter.prefix.events.tracker` keeps these and gives them messages.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvrouter.prefix.events.confidence import IndexState, Reason
from kvrouter.prefix.events.mapping import BlockNaming, Naming
from kvrouter.prefix.events.sequencer import Sequencer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.engine import Engine, HashDomain
    from kvrouter.prefix.events.mapping import BlockMapping, MappingTally
    from kvrouter.prefix.events.reorder import Budget, Message
    from kvrouter.prefix.index import PrefixIndex

log = logging.getLogger(__name__)


class ReplayRequests(Protocol):
    """Asks publishers to repeat messages."""

    def ask(self, server: Engine, rank: int, start: int) -> bool:
        """Ask in place of what was asked of it before; False where no publisher is known.

        Answers go to `EventLedger.replayed`, `replay_ended` and `replay_failed`.
        """


@dataclass(slots=True)
class Workings:
    """What all publishers share."""

    index: PrefixIndex
    claims: BlockMapping
    domain: Callable[[], HashDomain | None]
    counts: MappingTally
    budget: Budget
    replays: ReplayRequests | None = None


@dataclass(slots=True, eq=False)
class EngineCache:
    """What is known of one engine, or of one of its data-parallel ranks.

    Attributes:
        engine: this.
        names: how its events name blocks.
        streams: its publishers: one, but where several ranks are one target.
        standing: how well its cache is known.
        guessed: whether the index holds guesses of it.
        forgotten: what the index had forgotten when the engine was last known to be empty.
        owed: a prompt that it computed and has not told of, and since when.
        owed_prompts: how many such prompts there were.
        told: the messages that had come by then.
        dead: whether it owes for so long that it is believed to tell nothing any more.
    """

    engine: Engine
    forgotten: int
    names: BlockNaming = field(default_factory=BlockNaming)
    streams: list[Sequencer] = field(default_factory=list)
    standing: Reason = Reason.NO_EVENTS
    guessed: bool = False
    owed: bytes = b""
    owed_since: float = 0.0
    owed_prompts: int = 0
    told: int = 0
    silent: bool = False
    dead: bool = False

    def messages(self) -> int:
        """A number that changes with each message that is applied."""
        return sum(stream.next or 0 for stream in self.streams)


class Publisher:
    """One publisher of an engine: its stream, and what that does to what is known of the engine."""

    __slots__ = ("_with", "rank", "server", "source", "stream")

    def __init__(self, workings: Workings, source: EngineCache, server: Engine, rank: int) -> None:
        self._with = workings
        self.source = source
        self.server = server
        self.rank = rank
        self.stream = Sequencer(self, workings.budget)
        source.streams.append(self.stream)

    def apply(self, message: Message) -> None:
        """The events of `message`, in order."""
        workings, source, batch = self._with, self.source, message.batch
        if source.guessed:
            self._drop_guesses()
        workings.counts["events"] += len(batch.events)
        if batch.unknown:
            workings.counts["unknown_event"] += batch.unknown
        for event in batch.events:
            if workings.claims.apply(source.engine, source.names, event):
                self._emptied()

    def forget(self) -> None:
        """What the engine was known to hold is void."""
        source = self.source
        self._with.claims.empty(source.engine, source.names)
        source.forgotten = self._with.index.forgotten
        source.guessed = False
        for stream in source.streams:
            if stream is not self.stream:
                stream.complete, stream.missing = False, Reason.LOST

    def ask(self, start: int) -> bool:
        """Have messages from `start` on repeated."""
        replays = self._with.replays
        return replays is not None and replays.ask(self.server, self.rank, start)

    def count(self, kind: str, first: int, last: int) -> None:
        """Count, and say what matters."""
        counts, name = self._with.counts, self.source.engine.address
        counts[kind] += last - first + 1 if kind == "lost" else 1
        if kind == "gaps":
            log.warning("KV events of %s: messages %d to %d are missing", name, first, last)
        elif kind == "restarts":
            text = "KV events of %s: publisher restarted (message %d, expected %d)"
            log.warning(text, name, first, last)
        elif kind == "lost":
            text = "KV events of %s: messages %d to %d are lost: its part of the index starts anew"
            log.warning(text, name, first, last)
        elif kind == "unanswered":
            text = "KV events of %s: its publisher does not replay messages from %d on"
            log.warning(text, name, first)

    def changed(self) -> None:
        """How well the engine is known may have changed."""
        settle(self.source)

    def _emptied(self) -> None:
        """The engine holds nothing: from here on all is known."""
        source = self.source
        source.forgotten = self._with.index.forgotten
        for stream in source.streams:
            stream.complete = stream is self.stream
        settle(source)

    def _drop_guesses(self) -> None:
        """It tells by itself from now on; unless nothing can be made of what it tells."""
        source, workings = self.source, self._with
        if source.names.naming is Naming.FOREIGN and source.names.domain == workings.domain():
            return
        workings.claims.empty(source.engine, source.names)
        source.guessed = False
        if source.dead:  # what it told before stood among the guesses
            source.names.dropped = True
            for stream in source.streams:
                stream.complete, stream.missing = False, Reason.LATE


def settle(source: EngineCache) -> None:
    """Find how well it is known now; a change is logged."""
    standing = _standing(source)
    before, source.standing = source.standing, standing
    if standing is before:
        return
    level = logging.WARNING if standing.state is not IndexState.EXACT else logging.INFO
    if standing is Reason.NO_EVENTS or Reason.GAP in (before, standing):
        level = logging.INFO  # passing, or told when it happened
    log.log(
        level,
        "KV index of %s: %s (%s), was %s (%s)",
        source.engine.address,
        standing.state.upper(),
        standing,
        before.state.upper(),
        before,
    )


def _standing(source: EngineCache) -> Reason:
    """How well an engine is known: the worst that is true of it."""
    reasons = {stream.reason for stream in source.streams}
    names = source.names
    for true, reason in (
        (source.dead, Reason.DEAD),
        (reasons <= {Reason.NO_EVENTS}, Reason.NO_EVENTS),
        (names.naming is Naming.FOREIGN, Reason.FOREIGN),
        (Reason.GAP in reasons, Reason.GAP),
        (Reason.CUT in reasons, Reason.CUT),
        (len(source.streams) > 1, Reason.RANKS),
        (source.silent, Reason.SILENT),
        (Reason.LOST in reasons, Reason.LOST),
        (Reason.LATE in reasons, Reason.LATE),
        (names.unnamed, Reason.UNNAMED),
    ):
        if true:
            return reason
    return Reason.COMPLETE
