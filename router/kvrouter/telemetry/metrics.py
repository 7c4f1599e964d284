"""Counters and histograms of the router, for Prometheus.

A counter of prometheus_client takes a lock and a label lookup for each event. One event loop needs
neither, so values are plain numbers here and become metric families at each scrape.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from platform import python_version
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvrouter import __version__
from kvrouter._native import Buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

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


class Histogram:
    """A histogram without labels, observed from one thread.

    Attributes:
        buckets: the counts; native code adds to them for the events of streams.
        observe: counts a value; the native method itself.
    """

    __slots__ = ("_bounds", "buckets", "help", "name", "observe")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = text
        self.buckets = Buckets(bounds)
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
    """Histograms of one name, one for each value of a label."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label: str, values: Sequence[str]
    ) -> None:
        self.name = name
        self.help = text
        self._label = label
        self._each = {value: Histogram(name, text, bounds) for value in values}
        self._observers = tuple(one.observe for one in self._each.values())

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


Row = tuple[tuple[str, ...], float]


class Reading:
    """A gauge, or with `grows` a counter, whose rows `read` returns at each scrape."""

    def __init__(
        self,
        name: str,
        text: str,
        read: Callable[[], Iterable[Row]],
        labels: Sequence[str] = (),
        *,
        grows: bool = False,
    ) -> None:
        self.name = name
        self.help = text
        self.labels = tuple(labels)
        self._read = read
        self._grows = grows

    def family(self) -> Metric:
        """As Prometheus has it."""
        family: CounterMetricFamily | GaugeMetricFamily
        kind = CounterMetricFamily if self._grows else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for labels, value in self._read():
            family.add_metric(labels, value)
        return family


class Metrics(Collector):
    """All metrics of one router. Names follow vLLM's (`vllm:` -> `kvrouter:`) where it has them.

    Attributes:
        running: requests in flight.
        settle: counts requests that have ended since the last call; called before a scrape.
    """

    def __init__(self) -> None:
        self.running = 0
        self.settle: Callable[[], None] = lambda: None
        self._name_times()
        self._name_ends()
        self._name_counts()
        self._name_handovers()
        self._name_tokens()
        build = __version__, python_version()
        self._more: list[Reading | Tally] = [
            Reading(
                "kvrouter:num_requests_running",
                "Requests in flight.",
                lambda: [((), float(self.running))],
            ),
            Reading(
                "kvrouter:build_info",
                "Always 1; the labels are the versions of kvrouter and Python.",
                lambda: [(build, 1.0)],
                ["version", "python"],
            ),
        ]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def _name_times(self) -> None:
        self.ttft = Histogram(
            "kvrouter:time_to_first_token_seconds",
            "From the request's arrival to the first byte of its answer.",
            TTFT_BUCKETS,
        )
        self.ttft_parts = Histograms(
            "kvrouter:time_to_first_token_part_seconds",
            "Parts of the time to the first token, which add up to it: queue (wait for its turn or "
            "for an engine), tokenise, plan (parse, hash, look up the store, choose), prefill "
            "(leg), landing (of its KV), decode (leg, until its first byte).",
            TTFT_BUCKETS,
            "part",
            PARTS,
        )
        self.gaps = Histogram(
            "kvrouter:inter_token_latency_seconds",
            "Time between two events of a stream.",
            GAP_BUCKETS,
        )
        self.e2e = Histogram(
            "kvrouter:e2e_request_latency_seconds",
            "From the request's arrival to the end of its answer.",
            REQUEST_BUCKETS,
        )
        self.prefill = Histogram(
            "kvrouter:request_prefill_time_seconds",
            "Successful prefill legs, from sending to the whole answer.",
            REQUEST_BUCKETS,
        )
        self.decode = Histogram(
            "kvrouter:request_decode_time_seconds",
            "Successful decode legs, from sending to the end of the answer.",
            REQUEST_BUCKETS,
        )
        self.handoff = Histogram(
            "kvrouter:handoff_seconds",
            "From the prefill leg's answer to the landing of its KV.",
            TTFT_BUCKETS,
        )
        self.queue = Histogram(
            "kvrouter:request_queue_time_seconds",
            "Time in the queue of requests that could not begin at once.",
            REQUEST_BUCKETS,
        )
        self.overhead = Histogram(
            "kvrouter:coordinator_overhead_seconds",
            "From the request's arrival to its first leg.",
            OVERHEAD_BUCKETS,
        )

    def _name_ends(self) -> None:
        self.success = Tally(
            "kvrouter:request_success",
            "Successful requests, by the reason for which generation ended; other: a reason that "
            "neither OpenAI nor vLLM have, unknown: the engine gave none.",
            ["finished_reason"],
        )
        self.errors = Tally(
            "kvrouter:request_errors",
            "Failed requests, by the status that clients got; 499: the client left.",
            ["code"],
        )
        self.cut_off = Tally(
            "kvrouter:requests_cut_off",
            "Requests that the router cut off because it stopped: stream (the answer had begun and "
            "ended with an error event) or none (answered 503).",
            ["answer"],
        )
        self.passed_through = Tally(
            "kvrouter:passed_through",
            "Requests to endpoints that one engine answers, by the status that clients got.",
            ["path", "code"],
        )

    def _name_counts(self) -> None:
        self.aliases = Tally(
            "kvrouter:alias_requests",
            "Requests for an alias (--model-alias), by the model that they got.",
            ["alias", "model"],
        )
        self.upstream_errors = Tally(
            "kvrouter:upstream_errors",
            "Failed legs by reason: a refused or broken connection, a status, a time-out, an "
            "unusable answer, a full engine.",
            ["leg", "reason"],
        )
        self.plans = Tally(
            "kvrouter:plans",
            "Plans by reason; prefill: both legs, other reasons: one leg.",
            ["why"],
        )
        self.resumed = Tally(
            "kvrouter:streams_broken",
            "Streams whose engine broke off, among those that --resume-streams covers: resumed or "
            "given up.",
            ["outcome"],
        )

    def _name_handovers(self) -> None:
        self.landings = Tally(
            "kvrouter:landings",
            "Landings that requests waited for: landed, timeout, store_away or unknown_manifest.",
            ["outcome"],
        )
        self.ahead = Tally(
            "kvrouter:decode_ahead",
            "Decode legs planned before their KV had landed: answered, withdrawn, failed or not "
            "sent.",
            ["outcome"],
        )
        self.handoff_missing = Tally(
            "kvrouter:handoff_missing",
            "Prefill legs whose answer named no KV although the engine transfers KV.",
        )
        self.rebound = Tally(
            "kvrouter:decode_rebound",
            "Decode legs for which the router chose another engine when the KV had landed.",
        )
        self.releases = Tally(
            "kvrouter:stranded_release",
            "KV that no decode leg fetched: released at once, or stranded until its lease ends.",
            ["outcome"],
        )

    def _name_tokens(self) -> None:
        self.prompt_tokens = Tally("kvrouter:prompt_tokens", "Prompt tokens of plans.")
        self.generation_tokens = Tally(
            "kvrouter:generation_tokens",
            "Tokens that clients got, also of answers that broke off; events of streams without "
            "usage.",
        )
        self.hit_tokens = Tally(
            "kvrouter:prefix_hit_tokens",
            "Prompt tokens by the place of their KV at the plan: in the decode engine (engine), "
            "otherwise in the store (store), unknown (none). They add up to the prompt tokens.",
            ["source"],
        )
        self.cached_tokens = Tally(
            "kvrouter:prefill_cached_tokens",
            "Prompt tokens that prefill engines did not compute, according to their answers.",
        )
        self.usage_mismatch = Tally(
            "kvrouter:usage_mismatch", "Answers whose legs counted different prompt tokens."
        )

    def add(self, metric: Reading | Tally) -> None:
        """Expose one more metric."""
        self._more.append(metric)

    def collect(self) -> Iterator[Metric]:
        """All metrics, for the registry of prometheus_client."""
        self.settle()
        for metric in (*vars(self).values(), *self._more):
            if isinstance(metric, Histogram | Histograms | Tally | Reading):
                yield metric.family()

    def families(self) -> list[Metric]:
        """All metrics of a scrape, also those of the process."""
        return list(self._registry.collect())

    def page(self) -> bytes:
        """The text of a scrape."""
        return generate_latest(self._registry)


PARTS: Final = ("queue", "tokenise", "plan", "prefill", "landing", "decode")
"""Parts of the time to the first token, in their order."""

NOT_WELL: Final = frozenset({"broken", "client_left", "cut_off", "error", "refused"})
"""Outcomes of failed requests."""

FINISH_REASONS: Final = frozenset(
    {
        *("stop", "length", "abort", "repetition"),  # vLLM, vllm/v1/engine/__init__.py
        *("tool_calls", "function_call", "content_filter"),  # OpenAI
        "unknown",  # the engine gave none
    }
)
"""Finish reasons that are counted by name; all others count as "other"."""
