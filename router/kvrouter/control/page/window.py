"""What counters grew by in the last minute. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

Name = TypeVar("Name")

MINUTE_S: Final = 60.0


class Growth(Generic[Name]):
    """Growth of counters, which never fall, within the last minute."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[Name, float]]] = deque()

    def note(self, now_s: float, totals: Mapping[Name, float]) -> None:
        """Add a reading; must be called about once per second."""
        self._readings.append((now_s, totals))
        while len(self._readings) > 2 and self._readings[1][0] <= now_s - MINUTE_S:
            self._readings.popleft()

    def of(self, name: Name) -> float:
        """Growth of the counter `name`."""
        if not self._readings:
            return 0.0
        first, last = self._readings[0][1], self._readings[-1][1]
        return last.get(name, 0.0) - first.get(name, 0.0)

    @property
    def covered_s(self) -> float:
        """Time between the oldest and the newest reading."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0
