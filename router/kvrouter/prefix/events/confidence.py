"""How well the router knows an engine's cache: three states, each with a reason."""

from __future__ import annotations

from enum import StrEnum


class IndexState(StrEnum):
    """How reliable the index is about an engine's cache."""

    EXACT = "exact"  # it has the blocks that the engine holds, and no others
    DEGRADED = "degraded"  # blocks may be missing, or wait for confirmation
    FALLBACK = "fallback"  # without events: the router goes by what it sent to the engine


class Reason(StrEnum):
    """Why an engine's part of the index is in its state; a metric's label.

    `trusted`: the engine certainly holds its blocks of the index, so that a prefill leg may be
    skipped.
    """

    state: IndexState
    trusted: bool

    COMPLETE = "complete", IndexState.EXACT, True
    """Every event since the publisher began, or since the cache was emptied, was applied."""
    LATE = "late", IndexState.DEGRADED, True
    """What was stored before the router listened is unknown."""
    LOST = "lost", IndexState.DEGRADED, True
    """Messages were lost for good: what was known before them is forgotten."""
    UNNAMED = "unnamed", IndexState.DEGRADED, True
    """Some blocks could not be mapped to the router's hashes."""
    FULL = "index full", IndexState.DEGRADED, True
    """Blocks were forgotten because the index is full."""
    GAP = "gap", IndexState.DEGRADED, False
    """Messages are missing, and may have removed blocks of the index."""
    CUT = "cut off", IndexState.DEGRADED, False
    """The connection broke, or a replay was not answered: messages may be missing."""
    SILENT = "silent", IndexState.DEGRADED, False
    """The engine computed blocks without an event: its stream of events may be dead."""
    LOOKAHEAD = "look-ahead", IndexState.DEGRADED, False
    """Its names cover tokens after a block: the last block of a match may be another one."""
    RANKS = "ranks", IndexState.DEGRADED, False
    """Several data-parallel ranks are one target: which of them holds a block is unknown."""
    NO_EVENTS = "no events", IndexState.FALLBACK, False  # the engine never sent an event
    FOREIGN = "foreign", IndexState.FALLBACK, False
    """Its blocks have another size than the router's."""
    UNCOUNTED = "uncounted", IndexState.FALLBACK, False
    """It stored blocks, but none of a cache group that keeps the whole history."""
    DEAD = "dead", IndexState.FALLBACK, False
    """It has been silent for so long that guesses are better than its events."""

    def __new__(cls, word: str, state: IndexState, trusted: bool) -> Reason:
        """A member with its state."""
        made = str.__new__(cls, word)
        made._value_ = word
        made.state = state
        made.trusted = trusted
        return made
