"""What is counted and timed by model. The number of series is bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.telemetry.series import (
    GAP_BUCKETS,
    REQUEST_BUCKETS,
    TTFT_BUCKETS,
    Histograms,
    Reading,
    Row,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


MODEL: Final = "model"  # the label that names the model of a request; empty while it is unknown
MAX_MODELS: Final = 100  # models with series of their own
OTHER_MODELS: Final = "other"
"""The label of those that come later: adapters may come and go without end."""


class ModelMetrics:
    """Counts and times of the requests for one model; code on their way adds to them.

    Attributes:
        running: requests in flight.
        waiting: requests that wait to begin.
        prompt_tokens: of plans; `hit_engine`, `hit_lower` and `hit_store` have KV there.
        cached_tokens: that prefill engines did not compute.
        generation_tokens: that clients got.
        fates: prompt tokens by what became of them, see `kvrouter.fates`.
    """

    __slots__ = (
        *("label", "running", "waiting", "ttft", "gaps", "e2e", "queue"),
        *("prompt_tokens", "hit_engine", "hit_lower", "hit_store"),
        *("cached_tokens", "generation_tokens", "fates"),
    )

    def __init__(self, label: str, times: ByModel) -> None:
        self.label = label  # its name in labels
        self.ttft = times.ttft.of(label)
        self.gaps = times.gaps.of(label)
        self.e2e = times.e2e.of(label)
        self.queue = times.queue.of(label)
        self.running = self.waiting = 0
        self.prompt_tokens = self.hit_engine = self.hit_lower = self.hit_store = 0
        self.cached_tokens = self.generation_tokens = 0
        self.fates: dict[str, int] = {}


class ByModel:
    """All series of requests that have the label `model`, except those by outcome."""

    def __init__(self) -> None:
        self._each: dict[str, ModelMetrics] = {}
        self.ttft = Histograms(
            "kvrouter:time_to_first_token_seconds",
            "From the request's arrival to the first byte of its answer.",
            TTFT_BUCKETS,
            MODEL,
        )
        self.gaps = Histograms(
            "kvrouter:inter_token_latency_seconds",
            "Time between two events of a stream.",
            GAP_BUCKETS,
            MODEL,
        )
        self.e2e = Histograms(
            "kvrouter:e2e_request_latency_seconds",
            "From the request's arrival to the end of its answer.",
            REQUEST_BUCKETS,
            MODEL,
        )
        self.queue = Histograms(
            "kvrouter:request_queue_time_seconds",
            "Time in a queue, of requests that could not begin at once; each queue counts.",
            REQUEST_BUCKETS,
            MODEL,
        )
        self.series = (self.ttft, self.gaps, self.e2e, self.queue, *self._counters())

    def __iter__(self) -> Iterator[ModelMetrics]:
        """Those of every model that was asked for so far."""
        return iter(self._each.values())

    def of(self, model: str) -> ModelMetrics:
        """Those of a model that was found to be served; "": of requests whose model is unknown."""
        return self._each.get(model) or self._new(model)

    def _counters(self) -> Iterator[Reading]:
        yield self._counter(
            "prompt_tokens", "Prompt tokens of plans.", lambda one: one.prompt_tokens
        )
        yield self._counter(
            "generation_tokens",
            "Tokens that clients got, also of answers that broke off; events of streams "
            "without usage.",
            lambda one: one.generation_tokens,
        )
        yield self._counter(
            "prefill_cached_tokens",
            "Prompt tokens that prefill engines did not compute, according to their answers.",
            lambda one: one.cached_tokens,
        )
        yield Reading(
            "kvrouter:prefix_hit_tokens",
            "Prompt tokens by the place of their KV at the plan: in the decode engine "
            "(engine), its host memory or storage (lower), the store (store), or unknown (none). "
            "They add up to the prompt tokens.",
            self._hits,
            ["source", MODEL],
            grows=True,
        )
        yield Reading(
            "kvrouter:prompt_tokens_by_fate",
            "Prompt tokens of answered requests, each by its one fate: reused from where, or "
            "computed for which reason (docs/why.md).",
            lambda: (((fate, one.label), n) for one in self for fate, n in one.fates.items()),
            ["fate", MODEL],
            grows=True,
        )

    def _new(self, model: str) -> ModelMetrics:
        full = len(self._each) >= MAX_MODELS
        label = OTHER_MODELS if model and full else model
        found = self._each.get(label)
        if found is None:
            found = self._each[label] = ModelMetrics(label, self)
        return found

    def _counter(self, name: str, text: str, count: Callable[[ModelMetrics], int]) -> Reading:
        return Reading(
            f"kvrouter:{name}",
            text,
            lambda: ((one.label, count(one)) for one in self),
            [MODEL],
            grows=True,
        )

    def _hits(self) -> Iterator[Row]:
        for one in self:
            found = {"engine": one.hit_engine, "lower": one.hit_lower, "store": one.hit_store}
            found["none"] = one.prompt_tokens - sum(found.values())
            for source, tokens in found.items():
                yield (source, one.label), tokens
