"""The metrics of a simulated engine: vLLM's names, and `kvsim:` for what only a simulator knows.

Names and labels: vllm/v1/metrics/loggers.py of vLLM 0.32.
"""

from collections.abc import Iterable
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrouter.telemetry.series import GAP_BUCKETS, REQUEST_BUCKETS, TTFT_BUCKETS
from kvrouter_store.connection.address import Kind

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class SimMetrics:
    """Every series of one engine, in a registry of its own; labels tell the shape of its cache."""

    def __init__(self, model: str, block_size: int, blocks: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self.running = self._one(Gauge, "vllm:num_requests_running", "Requests that run.")
        self.waiting = self._one(Gauge, "vllm:num_requests_waiting", "Requests that wait.")
        usage = "Share of the KV cache that requests hold, 0 to 1."
        self.cache_usage = self._one(Gauge, "vllm:kv_cache_usage_perc", usage)
        reasons, ended = ("length", "stop", "abort"), "Requests that ended."
        name, label = "vllm:request_success", "finished_reason"
        self.finished = self._each(Counter, name, ended, label, reasons)
        self._add_tokens()
        self._add_times()
        self._add_store()
        shape = {"block_size": block_size, "num_gpu_blocks": blocks, "engine": "0"}
        name, text = "vllm:cache_config_info", "Information of the KV cache."
        Gauge(name, text, tuple(shape), registry=self.registry).labels(**shape).set(1)

    def use_transport(self, used: str) -> None:
        """Set the transport in use; '' without a connection to the store."""
        for name, gauge in self._transports.items():
            gauge.set(name == used)

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _add_tokens(self) -> None:
        self.prefix_queries, self.prefix_hits, self.external_queries, self.external_hits = (
            self._one(Counter, f"vllm:{name}", f"Prompt tokens {what}.")
            for name, what in (
                ("prefix_cache_queries", "looked up in the engine's own cache"),
                ("prefix_cache_hits", "found in the engine's own cache"),
                ("external_prefix_cache_queries", "looked up in the store"),
                ("external_prefix_cache_hits", "loaded from the store"),
            )
        )
        self.prompt_tokens = self._one(Counter, "vllm:prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._one(Counter, "vllm:generation_tokens", "Tokens generated.")
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        name, text = "vllm:prompt_tokens_by_source", "Prompt tokens by source."
        by_source = self._each(Counter, name, text, "source", sources)
        self.computed_tokens, self.local_tokens, self.loaded_tokens = by_source.values()

    def _add_times(self) -> None:
        self.first_token, self.between_tokens, *whole = (
            self._one(Histogram, f"vllm:{name}_seconds", text, buckets=buckets)
            for name, text, buckets in (
                ("time_to_first_token", "Time to first token.", TTFT_BUCKETS),
                ("inter_token_latency", "Time between tokens.", GAP_BUCKETS),
                ("e2e_request_latency", "Time of a request.", REQUEST_BUCKETS),
                ("request_queue_time", "Time spent waiting.", REQUEST_BUCKETS),
                ("request_prefill_time", "Time of the prefill.", REQUEST_BUCKETS),
                ("request_decode_time", "Time of the decode.", REQUEST_BUCKETS),
            )
        )
        self.whole_request, self.queue_time, self.prefill_time, self.decode_time = whole

    def _add_store(self) -> None:
        self.wrong_blocks, self.lost_blocks, self.saved_blocks, self.store_errors = (
            self._one(Counter, f"kvsim:{name}", text)
            for name, text in (
                ("wrong_blocks", "Loaded blocks whose bytes were not those of their hash."),
                ("lost_blocks", "Blocks that the store had announced and did not deliver."),
                ("saved_blocks", "Blocks put into the store."),
                ("store_errors", "Operations that the store failed."),
            )
        )
        text = "How blocks travel to and from the store: 1 for the way in use."
        name, label = "kvsim:store_transport", "transport"
        self._transports = self._each(Gauge, name, text, label, get_args(Kind))
        self.injected = self._one(Counter, "kvsim:injected_failures", "Failures made on purpose.")

    def _one(self, kind: type[Metric], name: str, text: str, **more: Any) -> Metric:
        family = kind(name, text, tuple(self._labels), registry=self.registry, **more)
        return family.labels(**self._labels)

    def _each(
        self, kind: type[Metric], name: str, text: str, label: str, values: Iterable[str]
    ) -> dict[str, Metric]:
        """A series for each value of one more label."""
        family = kind(name, text, (*self._labels, label), registry=self.registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}
