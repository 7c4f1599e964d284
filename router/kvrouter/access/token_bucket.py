"""A token bucket: so much per second, and so much at once. Synchronous, over an injected clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDING: Final = 1e-9


class Bucket:
    """Fills at a steady rate up to its burst, and begins full.

    What is taken may be more than was there, as where an answer turned out longer: then nothing is
    given until the debt has been refilled, so that in the long run no more passes than the rate.

    Args:
        rate_per_s: units that come back per second, above 0.
        burst: units that it holds when full, above 0.
        clock: seconds, monotonic.
    """

    __slots__ = ("_at_s", "_burst", "_clock", "_level", "_rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._clock = clock
        self._level = burst
        self._at_s = clock()

    def take(self, amount: float) -> float:
        """Take `amount` where it is there, or where the bucket is full and never holds so much.

        Returns:
            0.0 where it was taken; else the seconds until it can be, with nothing taken.
        """
        self._fill()
        needed = min(amount, self._burst)
        lacking = needed - self._level
        if lacking > needed * _ROUNDING:
            return lacking / self._rate_per_s
        self._level -= amount
        return 0.0

    def charge(self, amount: float) -> None:
        """Take `amount` whether it is there or not: it has been used already."""
        self._fill()
        self._level -= amount

    def adjust(self, rate_per_s: float, burst: float) -> None:
        """Go on at another rate; debts stay."""
        self._fill()
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._level = min(self._level, burst)

    def _fill(self) -> None:
        now_s = self._clock()
        level = self._level + (now_s - self._at_s) * self._rate_per_s
        self._level = min(level, self._burst)
        self._at_s = now_s
