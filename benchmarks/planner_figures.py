"""Figures of the planner benchmark's measurements. Pure arithmetic."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from benchmarks.planner_client import Reply
from benchmarks.planner_load import Ask
from benchmarks.store.figures import percentile

NINETY_PERCENT = 1.645
"""Standard deviations to each side."""


@dataclass
class Figures:
    """The measurements of one setup, in seconds.

    Attributes:
        first_s: time to the first token, of each request in its order.
        whole_s: time of the whole answer.
        gaps_s: times between tokens.
        held: shares of their caches that decode engines used, at each sample.
        late_s: how late requests were sent, because the machine was busy.
    """

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    held: list[list[float]] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The measurements of several runs together, in their order."""
        whole = cls()
        for part in parts:
            for name, values in vars(part).items():
                getattr(whole, name).extend(values)
        return whole

    def summary(self) -> dict[str, float]:
        """Each figure by its name."""
        first_s, gaps_s = sorted(self.first_s), sorted(self.gaps_s)
        return {
            "requests": len(self.first_s),
            "ttft_mean_ms": 1000 * statistics.fmean(self.first_s),
            "ttft_p50_ms": 1000 * percentile(first_s, 50),
            "ttft_p95_ms": 1000 * percentile(first_s, 95),
            "ttft_p99_ms": 1000 * percentile(first_s, 99),
            "gap_p50_ms": 1000 * percentile(gaps_s, 50),
            "gap_p99_ms": 1000 * percentile(gaps_s, 99),
            "answer_mean_s": statistics.fmean(self.whole_s),
            "decode_largest_over_mean": unevenness(self.held),
            "late_p99_ms": 1000 * percentile(sorted(self.late_s), 99),
        }


@dataclass(frozen=True)
class Paired:
    """Differences in the time to first token of the same requests, in milliseconds."""

    median_ms: float
    low_ms: float
    high_ms: float
    mean_ms: float

    def __str__(self) -> str:
        return (
            f"{self.median_ms:+.0f} ({self.low_ms:+.0f} to {self.high_ms:+.0f}); "
            f"{self.mean_ms:+.0f}"
        )


def figures(
    asks: Sequence[Ask],
    replies: Sequence[Reply],
    samples: Sequence[tuple[float, list[float]]],
    warm_up_s: float,
) -> Figures:
    """The figures of the requests after the warm-up."""
    counted = [r for a, r in zip(asks, replies, strict=True) if a.at_s >= warm_up_s]
    last_s = asks[-1].at_s
    return Figures(
        [reply.first_s for reply in counted],
        [reply.whole_s for reply in counted],
        [gap for reply in counted for gap in reply.gaps_s],
        [held for at_s, held in samples if warm_up_s <= at_s <= last_s],
        [reply.late_s for reply in counted],
    )


def unevenness(samples: Sequence[Sequence[float]]) -> float:
    """The load of the fullest engine over the mean load, over all samples."""
    return sum(map(max, samples)) / sum(map(statistics.fmean, samples))


def paired(before: Figures, after: Figures) -> Paired:
    """After minus before for each request; the median's interval by ranks (binomial)."""
    pairs = zip(before.first_s, after.first_s, strict=True)
    differences = sorted(1000 * (b - a) for a, b in pairs)
    count = len(differences)
    reach = NINETY_PERCENT * math.sqrt(count) / 2
    low, high = math.floor((count - 1) / 2 - reach), math.ceil((count - 1) / 2 + reach)
    return Paired(
        statistics.median(differences),
        differences[max(0, low)],
        differences[min(count - 1, high)],
        statistics.fmean(differences),
    )
