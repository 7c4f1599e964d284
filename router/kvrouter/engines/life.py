"""Whether engines live. Synchronous state machines over an injected clock; they do no I/O.

A server shows life by bytes on its legs, by KV events, by answers to checks and by counters of its
own that move. It is silent if it answers no check and shows nothing else (`Pulse`). A target whose
streams have begun owes progress too (`Progress`): a core may hang behind a server that answers, and
a parser may hold back what a core generates. Prefill legs and queues owe nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.engine import Engine

GAPS: Final = 20  # a stall lasts as many of the engine's own gaps between events, if that is longer
FIRST_GAP_S: Final = 1.0  # the most that the first gap counts
UNCOUNTED: Final = 6
"""How many times as long an engine without counters may stall: its parser may hold text back."""
PREFILL_ALONE: Final = 2
"""How many times as long an engine may be silent that has nothing but prefill legs."""
SUSPECT: Final = 0.6
"""An engine that is silent for this part of its time is asked at once: checks are 5 s apart, and
two that wait 5 s each for their answer would find it out after 15 s."""


@dataclass(slots=True)
class LifeLimits:
    """When an engine counts as dead; they may change. `membership/prober.py` asks."""

    stall_s: float = 10.0  # without progress
    silence_s: float = 10.0  # without any sign of life
    failed_checks: int = 2  # in a row, that a silent engine has not answered

    def follow(self, other: LifeLimits) -> None:
        """Be like `other` from now on."""
        self.stall_s, self.silence_s = other.stall_s, other.silence_s
        self.failed_checks = other.failed_checks


@dataclass(slots=True)
class Pulse:
    """The signs of life of one server."""

    clock: Callable[[], float]  # seconds
    limits: LifeLimits
    missed: int = 0  # checks since the last answer
    unread: int = 0  # looks since then that got none
    last_s: float = 0.0  # the latest sign

    def __post_init__(self) -> None:
        self.last_s = self.clock()

    def answered(self) -> None:
        """The server answered a check, well or not."""
        self.missed = self.unread = 0
        self.last_s = self.clock()

    def showed(self, at_s: float) -> None:
        """It gave another sign of life then."""
        self.last_s = max(self.last_s, at_s)

    @property
    def silent_s(self) -> float:
        """Seconds since the latest sign."""
        return self.clock() - self.last_s

    @property
    def is_suspect(self) -> bool:
        """Whether it is silent for so long that it has to be asked."""
        return self.silent_s >= self.limits.silence_s * SUSPECT

    def is_gone(self, *, prefills_alone: bool) -> bool:
        """Whether it is silent for too long; its legs, if there are any, may be silent ones."""
        patience_s = self.limits.silence_s * (PREFILL_ALONE if prefills_alone else 1)
        failed = self.missed + self.unread >= self.limits.failed_checks
        return failed and self.silent_s >= patience_s


class Look(Enum):
    """How to find out whether a core works whose streams give nothing."""

    COUNTERS = auto()  # by its counters of tokens
    TRIAL = auto()  # by a request of one token


@dataclass(slots=True)
class Progress:
    """What the begun streams of one target got, and what looks at its core showed in between."""

    clock: Callable[[], float]  # seconds
    limits: LifeLimits
    counts: bool | None = None  # whether it has counters of tokens; None: unknown
    gap_s: float = 0.0  # between two events of a stream, as it was lately; 0: unknown
    owes: bool = False  # whether a stream has begun that the router reads
    _last_s: float = 0.0  # when it last showed progress
    _looks: int = 0  # since then, that showed none
    _tokens: float | None = None  # of its counters, at the first of these looks that had an answer

    def saw(self, given_s: float | None, gap_s: float = 0.0) -> None:
        """Its begun streams last got something, or began to be read, then; None: there is none.

        Newer events came `gap_s` apart, in each stream; 0: there were none.
        """
        self.owes = given_s is not None
        if given_s is not None and given_s > self._last_s:
            self._showed(given_s)
        if gap_s:  # one long silence is no pace: it counts little, and not for long
            most_s = 2 * self.gap_s or FIRST_GAP_S
            self.gap_s = min(max(gap_s, self.gap_s / 2), most_s)

    @property
    def quiet_s(self) -> float:
        """Seconds for which it has owed progress and shown none."""
        return max(0.0, self.clock() - self._last_s) if self.owes else 0.0

    @property
    def limit_s(self) -> float:
        """Seconds after which it has stalled."""
        patience_s = self.limits.stall_s * (UNCOUNTED if self.counts is False else 1)
        return max(patience_s, GAPS * self.gap_s)

    def due(self) -> Look | None:
        """The look that is due."""
        if self.counts is False:
            return Look.TRIAL if self.quiet_s >= self.limit_s else None
        suspect = self.counts is None or self.quiet_s >= self.limit_s / 2
        return Look.COUNTERS if self.owes and suspect else None

    def counted(self, tokens: float | None) -> None:
        """Its counters stand at so many tokens; None: it has none."""
        self.counts = tokens is not None
        if self.quiet_s < self.limit_s / 2:
            return
        if self._tokens not in (None, tokens):
            self.worked()
        elif tokens is not None:
            self._tokens = tokens
            self._looks += 1

    def unanswered(self) -> None:
        """A look got no answer."""
        self._looks += self.counts is not None

    def worked(self) -> None:
        """It works, as a look showed; or it is let off once more."""
        self._showed(self.clock())

    @property
    def stalled(self) -> bool:
        """Whether its core has to be taken for dead."""
        looks = 1 if self.counts is False else 2
        return self._looks >= looks and self.quiet_s >= self.limit_s

    def _showed(self, at_s: float) -> None:
        self._last_s, self._looks, self._tokens = at_s, 0, None


@dataclass(eq=False)
class Lives:
    """The machines of all servers and targets, within limits that they share."""

    clock: Callable[[], float]  # seconds, that of the connections to engines
    limits: LifeLimits
    _pulses: dict[Engine, Pulse] = field(default_factory=dict, init=False)
    _progress: dict[Engine, Progress] = field(default_factory=dict, init=False)

    def pulse(self, server: Engine) -> Pulse:
        """The signs of life of `server`."""
        if server not in self._pulses:
            self._pulses[server] = Pulse(self.clock, self.limits)
        return self._pulses[server]

    def progress(self, target: Engine) -> Progress:
        """The progress of `target`."""
        if target not in self._progress:
            self._progress[target] = Progress(self.clock, self.limits)
        return self._progress[target]

    def restarted(self, target: Engine) -> None:
        """Forget what is known of the core of `target`: it joins, or leaves for good."""
        self._progress.pop(target, None)

    def forget(self, server: Engine) -> None:
        """`server` will not come back."""
        self._pulses.pop(server, None)
        for target in (server, *server.all_ranks.values()):
            self.restarted(target)
