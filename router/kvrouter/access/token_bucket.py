"""A token bucket, synchronous, over an injected clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDING: Final = 1e-9


class Bucket:
    """Fills at a steady rate up to its burst, and begins full.

    `charge` may leave a debt, for an answer that is longer than expected; `take` then refuses until
    the debt is refilled. In the long run no more passes than the rate.

    Args:
        rate_per_s: above 0.
        burst: size of the full bucket, above 0.
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
        """Take `amount`, if the bucket holds it or is full.

        Returns:
            0.0 if it was taken; else the seconds until it can be, and nothing is taken.
        """
        self._fill()
        needed = min(amount, self._burst)
        lacking = needed - self._level
        if lacking > needed * _ROUNDING:
            return lacking / self._rate_per_s
        self._level -= amount
        return 0.0

    def charge(self, amount: float) -> None:
        """Take `amount`, which has been used already, even if the bucket does not hold it."""
        self._fill()
        self._level -= amount

    def adjust(self, rate_per_s: float, burst: float) -> None:
        """Change the rate; a debt stays."""
        self._fill()
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._level = min(self._level, burst)

    def _fill(self) -> None:
        now_s = self._clock()
        level = self._level + (now_s - self._at_s) * self._rate_per_s
        self._level = min(level, self._burst)
        self._at_s = now_s
