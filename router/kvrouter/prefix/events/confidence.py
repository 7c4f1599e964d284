"""What the router knows of an engine's cache, and how well: three states, each with its reason.

How an engine names its blocks is another matter (`kvrouter.prefix.events.mapping.Naming`).
"""

from __future__ import annotations

from enum import StrEnum


class IndexState(StrEnum):
    """How far what the index says of an engine's cache can be relied on."""

    EXACT = "exact"  # what is said to be held is held, and nothing else is
    DEGRADED = "degraded"  # more may be held than is said, or what is said waits for proof
    FALLBACK = "fallback"  # the engine does not tell: the router goes by what it sent there


class Reason(StrEnum):
    """Why an engine's part of the index is in its state; a bounded set, a metric's label.

    `trusted` says whether what is claimed of the engine is held for certain, so that a prefill leg
    may be skipped by it.
    """

    state: IndexState
    trusted: bool

    COMPLETE = "complete", IndexState.EXACT, True
    """Every event since the publisher began, or since the cache was emptied, was applied."""
    LATE = "late", IndexState.DEGRADED, True
    """What was stored before the router listened is not known."""
    LOST = "lost", IndexState.DEGRADED, True
    """Messages were lost that nobody could replay: what was known before them is forgotten."""
    UNNAMED = "unnamed", IndexState.DEGRADED, True
    """Some blocks could not be named as the router names them."""
    FULL = "index full", IndexState.DEGRADED, True
    """Blocks were forgotten since the index had reached its bound."""
    GAP = "gap", IndexState.DEGRADED, False
    """Messages are missing and awaited: a block that they remove would be claimed falsely."""
    CUT = "cut off", IndexState.DEGRADED, False
    """The connection broke, or a replay was not answered: what came since may be missing."""
    SILENT = "silent", IndexState.DEGRADED, False
    """The engine computed blocks and told of none: its stream of events may be dead."""
    RANKS = "ranks", IndexState.DEGRADED, False
    """Several data-parallel ranks are one target: which of them holds a block is not known."""
    NO_EVENTS = "no events", IndexState.FALLBACK, False
    """It never told what it holds."""
    FOREIGN = "foreign", IndexState.FALLBACK, False
    """Its blocks are of another size than those of the router."""
    DEAD = "dead", IndexState.FALLBACK, False
    """It has been silent for so long that what was known of it is worth less than guesses."""

    def __new__(cls, word: str, state: IndexState, trusted: bool) -> Reason:
        """A member that knows its state."""
        made = str.__new__(cls, word)
        made._value_ = word
        made.state = state
        made.trusted = trusted
        return made
