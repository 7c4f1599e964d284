"""Counters, gauges and histograms that become metric families of Prometheus at each scrape.

A counter of prometheus_client takes a lock and a label lookup for each event. One event loop needs
neither, so values are plain numbers here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from pydantic import ByteSize

from kvrouter._native import Buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

# Buckets of vLLM (vllm/v1/metrics/loggers.py), so that panels made for it fit.
TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
GAP_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
OVERHEAD_BUCKETS: Final = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0,
)  # fmt: skip
Row = tuple[tuple[str, ...] | str, float]
"""The values of its labels (of a single one by itself), and its number."""
_TEXTS: Final = {
    "entries": "Entries of a cache: prompts with their token ids (tokens) or block hashes "
    "(block_hashes), marked blocks of prompts in flight (in_flight), blocks that engines hold in "
    "host memory (kv_host) and storage (kv_storage), by their KV events.",
    "bytes": "Memory of the entries of a cache.",
    "max_bytes": "Limit of the memory of a cache: the oldest entries make room; of in_flight, by "
    "--max-concurrent-requests.",
}


class Histogram:
    """A histogram without labels, observed from one thread."""

    __slots__ = ("_bounds", "buckets", "help", "name", "observe")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = text
        # The counts; native code adds to them for the events of streams.
        self.buckets = Buckets(bounds)
        # Counts a value; the native method itself.
        self.observe: Callable[[float], None] = self.buckets.observe
        self._bounds = (*map(str, bounds), "+Inf")

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.buckets.counts)

    def rows(self) -> list[tuple[str, float]]:
        """Cumulative counts, for Prometheus."""
        return list(zip(self._bounds, map(float, accumulate(self.buckets.counts)), strict=True))

    def family(self) -> Metric:
        """As Prometheus has it."""
        return HistogramMetricFamily(
            self.name, self.help, buckets=self.rows(), sum_value=self.buckets.sum
        )


class Histograms:
    """Histograms of one name, one for each value of a label; `values` are there from the start."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label: str, values: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.help = text
        self._bounds = bounds
        self._label = label
        self._each: dict[str, Histogram] = {}
        self._observers = tuple(self.of(value).observe for value in values)

    def of(self, value: str) -> Histogram:
        """That of one value of the label; values must be bounded."""
        found = self._each.get(value)
        if found is None:
            found = self._each[value] = Histogram(self.name, self.help, self._bounds)
        return found

    def observe(self, values: Sequence[float]) -> None:
        """Count one value for each value of the label, in their order."""
        for observe, value in zip(self._observers, values, strict=True):
            observe(value)

    def family(self) -> Metric:
        """As Prometheus has it."""
        family = HistogramMetricFamily(self.name, self.help, labels=[self._label])
        for value, one in self._each.items():
            family.add_metric([value], one.rows(), one.buckets.sum)
        return family


class Tally(defaultdict[tuple[str, ...] | str, int]):
    """A counter by the values of its labels, which must be bounded.

    `tally["stop"] += 1` with one label, `tally["decode", "full"] += 1` with several,
    `tally[()] += 1` without labels. No `collections.Counter`: its stores are slower.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        super().__init__(int)
        self.name = name
        self.help = text
        self.labels = tuple(labels)

    def family(self) -> Metric:
        """As Prometheus has it."""
        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        if not self.labels:
            family.add_metric((), self[()])
        for labels, count in self.items():
            if labels != ():
                family.add_metric((labels,) if isinstance(labels, str) else labels, count)
        return family


@dataclass(eq=False)
class Reading:
    """A gauge, or with `grows` a counter, that `read` returns at each scrape: a number, or rows."""

    name: str
    help: str
    read: Callable[[], float | Iterable[Row]]
    labels: Sequence[str] = ()
    grows: bool = False

    def family(self) -> Metric:
        """As Prometheus has it."""
        family: CounterMetricFamily | GaugeMetricFamily
        kind = CounterMetricFamily if self.grows else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        found = self.read()
        for labels, value in [((), found)] if isinstance(found, int | float) else found:
            family.add_metric((labels,) if isinstance(labels, str) else labels, float(value))
        return family


class CacheUse(NamedTuple):
    """Entries of a cache, their memory, and its limit."""

    entries: int
    bytes: int
    max_bytes: int


class BoundedCache(Protocol):
    """A cache with bounded memory."""

    @property
    def use(self) -> CacheUse:
        """Its entries and memory now."""


def cache_readings(caches: Mapping[str, BoundedCache]) -> Iterator[Reading]:
    """A gauge for each field of CacheUse, with a row for each cache."""
    for field, text in _TEXTS.items():
        yield Reading(f"kvrouter:cache_{field}", text, partial(_rows, field, caches), ["cache"])


def bounds(caches: Mapping[str, BoundedCache]) -> str:
    """The limits of caches, on one line for people."""
    sizes = {name: ByteSize(cache.use.max_bytes) for name, cache in caches.items()}
    return ", ".join(f"{name} {size.human_readable()}" for name, size in sizes.items())


def _rows(field: str, caches: Mapping[str, BoundedCache]) -> Iterator[Row]:
    return ((name, getattr(cache.use, field)) for name, cache in caches.items())
