"""How much of what is asked for is found, over time."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from typing import Final, Literal

Source = Literal["store", "tier"]
SOURCES: Final[tuple[Source, ...]] = ("store", "tier")


class HitRates:
    """Sums of processes' counters. A process may start again, or say nothing for a while."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._times: list[float] = []
        self._samples: list[defaultdict[str, float]] = []

    def take(self, process: str, counters: Mapping[str, float]) -> None:
        """Take in what a process has counted: `SOURCE asked` and `SOURCE found`."""
        for name, value in counters.items():
            before = self._last.get((process, name), 0.0)
            self._sums[name] += value - before if value >= before else value
            self._last[process, name] = value

    def sample(self, at_s: float) -> None:
        """Note the sums of this time."""
        self._times.append(at_s)
        self._samples.append(self._sums.copy())

    def rate(self, source: Source, from_s: float, to_s: float) -> float | None:
        """The share that was found, by the samples in this time; None where nothing was asked."""
        first, last = bisect_left(self._times, from_s), bisect_right(self._times, to_s) - 1
        if last <= first:
            return None
        begin, end = self._samples[first], self._samples[last]
        asked = end[f"{source} asked"] - begin[f"{source} asked"]
        found = end[f"{source} found"] - begin[f"{source} found"]
        return found / asked if asked else None
