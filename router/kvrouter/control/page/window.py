"""Numbers over time: sums of the last minute, and a bounded ring of buckets. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Name = TypeVar("Name")

BUCKET_S: Final = 5.0
HISTORY_S: Final = 900.0
MINUTE_S: Final = 60.0
_APART_S: Final = 1.0


class Growth(Generic[Name]):
    """Growth of counters within the last `span_s`, from readings at any times."""

    def __init__(self, span_s: float = MINUTE_S) -> None:
        self._span_s = span_s
        self._readings: deque[tuple[float, Mapping[Name, float]]] = deque()

    def note(self, now_s: float, totals: Mapping[Name, float]) -> None:
        """Add a reading, or replace the last one if both are of the same second.

        A counter that fell was reset, which discards earlier readings.
        """
        if self._readings and any(
            value < self._readings[-1][1].get(name, 0) for name, value in totals.items()
        ):
            self._readings.clear()
        if len(self._readings) > 1 and now_s - self._readings[-2][0] < _APART_S:
            self._readings.pop()
        self._readings.append((now_s, totals))
        while len(self._readings) > 2 and self._readings[1][0] <= now_s - self._span_s:
            self._readings.popleft()

    def of(self, name: Name) -> float:
        """Growth of the counter `name`."""
        if not self._readings:
            return 0.0
        first, last = self._readings[0][1], self._readings[-1][1]
        return max(0.0, last.get(name, 0.0) - first.get(name, 0.0))

    def grown(self) -> dict[Name, float]:
        """Every counter that grew, and its growth."""
        names = self._readings[-1][1] if self._readings else ()
        return {name: growth for name in names if (growth := self.of(name))}

    @property
    def covered_s(self) -> float:
        """Time between the oldest and the newest reading."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0


class Ring:
    """The last buckets of several series."""

    def __init__(
        self,
        names: Iterable[str],
        bucket_s: float = BUCKET_S,
        buckets: int = int(HISTORY_S / BUCKET_S),
    ) -> None:
        self.bucket_s = bucket_s
        self._series: dict[str, deque[float | None]] = {
            name: deque(maxlen=buckets) for name in names
        }

    def push(self, bucket: Mapping[str, float | None]) -> None:
        """Add a bucket; series that it does not name get null."""
        for name, series in self._series.items():
            value = bucket.get(name)
            series.append(None if value is None else round(value, 5))

    def series(self) -> dict[str, list[float | None]]:
        """Every series, the oldest bucket first."""
        return {name: list(values) for name, values in self._series.items()}


class Recent:
    """The latest values, no older than `span_s` and at most `limit`."""

    def __init__(
        self, clock: Callable[[], float], span_s: float = MINUTE_S, limit: int = 4096
    ) -> None:
        self._clock = clock
        self._span_s = span_s
        self._values: deque[tuple[float, float]] = deque(maxlen=limit)

    def add(self, value: float) -> None:
        """Add a value."""
        self._values.append((self._clock(), value))

    def quantiles(self, *shares: float) -> list[float | None]:
        """The quantiles for `shares` (0 to 1); None without values."""
        since_s = self._clock() - self._span_s
        while self._values and self._values[0][0] < since_s:
            self._values.popleft()
        ordered = sorted(value for _, value in self._values)
        if not ordered:
            return [None for _ in shares]
        return [ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in shares]
