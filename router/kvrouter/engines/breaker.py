"""Circuit breakers of engines and of pairs: synchronous state machines over an injected clock."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvrouter.engines.engine import Engine

log = logging.getLogger(__name__)


class BreakerState(StrEnum):
    """CLOSED lets all requests pass, OPEN none, HALF_OPEN one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_MOST_DOUBLED: Final = 60  # more would be no number


@dataclass(slots=True)
class BreakerLimits:
    """`threshold` failures in a row open it for `cooldown_s`; then one trial at a time passes.

    The pause doubles each time the trial request fails, up to `max_cooldown_s`. They may change.
    """

    threshold: int = 3
    cooldown_s: float = 1.0
    max_cooldown_s: float = 30.0


@dataclass(slots=True)
class Breaker:
    """The breaker of one engine, within limits that it shares with others."""

    clock: Callable[[], float]
    limits: BreakerLimits
    _failures: int = 0
    _opened: int = 0
    _retry_at: float = 0.0
    _trial: bool = False

    @property
    def state(self) -> BreakerState:
        """The state at this moment of the clock."""
        if not self._opened:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self.clock() < self._retry_at else BreakerState.HALF_OPEN

    @property
    def retry_s(self) -> float | None:
        """When, on the clock, an OPEN one will let a trial pass; None: it is not OPEN."""
        return self._retry_at if self.state is BreakerState.OPEN else None

    def allows(self) -> bool:
        """Whether a request may be sent now. Changes nothing."""
        if not self._opened:
            return True
        return not self._trial and self.clock() >= self._retry_at

    def began(self) -> None:
        """Note that a request was sent: in HALF_OPEN it is the trial, and others wait for it."""
        if self._opened:
            self._trial = True

    def ended(self) -> None:
        """Note that a request ended without a verdict (its client left): a new trial may start."""
        self._trial = False

    def succeeded(self) -> None:
        """Note a good answer: close the breaker and forget the failures."""
        self._failures = self._opened = 0
        self._trial = False

    def failed(self) -> bool:
        """Note a failure; returns whether it opened the breaker."""
        self._failures += 1
        if self._opened and not self._trial:
            return False  # the request was sent before the breaker opened
        if not self._opened and self._failures < self.limits.threshold:
            return False
        self._pause()
        self._opened += 1
        self._trial = False
        return True

    def _pause(self) -> None:
        limits = self.limits
        doubled_s = limits.cooldown_s * 2.0 ** min(self._opened, _MOST_DOUBLED)
        longest_s = max(limits.max_cooldown_s, limits.cooldown_s)
        self._retry_at = self.clock() + min(doubled_s, longest_s)


class PairBreaker(Breaker):
    """The breaker of what one prefill engine hands over to one decode engine.

    A trial begins with the plan of its legs, and need not end: the next one begins a pause later.
    """

    __slots__ = ()

    def allows(self) -> bool:
        """Whether a request may be sent to the pair now. Changes nothing."""
        return self.state is not BreakerState.OPEN

    def began(self) -> None:
        """Note the plan of a request: in HALF_OPEN it is the trial, and others wait for a pause."""
        if self._opened:
            self._trial = True
            self._pause()


@dataclass(eq=False, slots=True)
class Pairs:
    """Pairs of a prefill and a decode engine whose hand-overs have failed since they last worked.

    Each has a breaker, in `Engine.pairs` of the decode engine, while both engines are in the pool.
    A peer that restarts can leave NIXL's state poisoned on one side: all that such an engine hands
    over fails, while it answers everything else well (smg issue 2382).
    """

    clock: Callable[[], float]
    limits: BreakerLimits
    _failing: set[Engine] = field(default_factory=set, init=False)  # decode engines of such pairs

    def __contains__(self, decode: Engine) -> bool:
        return decode in self._failing

    def __bool__(self) -> bool:
        return bool(self._failing)

    def __iter__(self) -> Iterator[tuple[Engine, Engine, Breaker]]:
        for decode in self._failing:
            for prefill, breaker in decode.pairs.items():
                yield prefill, decode, breaker

    def failed(self, prefill: Engine, decode: Engine) -> None:
        """`decode` did not get what `prefill` handed over to it."""
        if prefill.identity is None or decode.identity is None:
            return
        self._failing.add(decode)
        if prefill not in decode.pairs:
            decode.pairs[prefill] = PairBreaker(self.clock, self.limits)
        closed = decode.pairs[prefill].state is BreakerState.CLOSED
        if decode.pairs[prefill].failed() and closed:
            names = prefill.address, decode.address
            log.warning("what engine %s hands over to %s fails: it is paired with others", *names)

    def worked(self, prefill: Engine, decode: Engine) -> None:
        """`decode` got what `prefill` handed over to it."""
        breaker = decode.pairs.pop(prefill, None)
        if breaker is not None and breaker.state is not BreakerState.CLOSED:
            log.info("engine %s hands over to %s again", prefill.address, decode.address)
        self._settle()

    def left(self, engines: Sequence[Engine]) -> None:
        """These engines are gone, and what was wrong with them."""
        for engine in engines:
            engine.pairs.clear()
            for decode in self._failing:
                decode.pairs.pop(engine, None)
        self._settle()

    def _settle(self) -> None:
        self._failing = {decode for decode in self._failing if decode.pairs}
