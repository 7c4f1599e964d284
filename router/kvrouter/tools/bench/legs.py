"""The times of legs between two scrapes of a router's metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvrouter.telemetry.metrics import Metrics
from kvrouter.tools.bench.figures import WIDTH, row

if TYPE_CHECKING:
    from collections.abc import Mapping

_SAMPLE: Final = re.compile(r"^(kvrouter:\w+_(?:sum|count)) (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class LegFigures:
    """How often a part of a request occurred, and its mean time."""

    count: int
    mean_ms: float


@dataclass(frozen=True)
class RouterLegs:
    """Sums and counts of the router's histograms, by series; empty for an engine."""

    samples: Mapping[str, float]

    @classmethod
    def read(cls, exposition: str) -> RouterLegs:
        """Read a /metrics page."""
        return cls({name: float(value) for name, value in _SAMPLE.findall(exposition)})

    def since(self, before: RouterLegs) -> dict[str, LegFigures]:
        """The parts of requests since the scrape `before`, by name."""
        metrics = Metrics()
        parts = {
            "coordination": metrics.overhead,
            "prefill leg": metrics.prefill,
            "landing": metrics.handoff,
            "decode leg": metrics.decode,
        }
        found = {}
        for part, histogram in parts.items():
            count = self._grown(before, f"{histogram.name}_count")
            if count:
                sum_s = self._grown(before, f"{histogram.name}_sum")
                found[part] = LegFigures(int(count), sum_s / count * 1000)
        return found

    def rows(self, before: RouterLegs) -> list[str]:
        """Lines for the printed block; none if nothing was counted."""
        found = self.since(before)
        if not found:
            return []
        prefilled = found["prefill leg"].count if "prefill leg" in found else 0
        return [
            f"{'Legs, as the router timed them':-^{WIDTH}}",
            row("Prefill legs:", prefilled),
            *(row(f"Mean {part} (ms):", leg.mean_ms) for part, leg in found.items()),
        ]

    def _grown(self, before: RouterLegs, name: str) -> float:
        return self.samples.get(name, 0.0) - before.samples.get(name, 0.0)
