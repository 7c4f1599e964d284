"""Circuit breaker of one engine: a synchronous state machine over an injected clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


class BreakerState(StrEnum):
    """CLOSED lets all requests pass, OPEN none, HALF_OPEN one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_MOST_DOUBLED: Final = 60
"""More would be no number."""


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
        limits = self.limits
        doubled_s = limits.cooldown_s * 2.0 ** min(self._opened, _MOST_DOUBLED)
        longest_s = max(limits.max_cooldown_s, limits.cooldown_s)
        self._retry_at = self.clock() + min(doubled_s, longest_s)
        self._opened += 1
        self._trial = False
        return True
