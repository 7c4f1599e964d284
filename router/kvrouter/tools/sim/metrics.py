"""What a simulated engine counts, under vLLM's names, plus `kvsim:` for what only it can know.

Names and labels: vllm/v1/metrics/loggers.py of vLLM 0.32.
"""

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrouter_store.connection.address import Kind

__all__ = ["SimMetrics"]

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LABELS = ("model_name", "engine")


class SimMetrics:
    """Every series of one engine, in a registry of its own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._count_requests()
        self._count_tokens()
        self._time_requests()
        self._count_store()

    def describe_cache(self, block_size: int, num_blocks: int) -> None:
        """Publish the shape of the cache as vLLM does, in labels."""
        gauge = Gauge(
            "vllm:cache_config_info",
            "Information of the KV cache.",
            ("block_size", "num_gpu_blocks", "engine"),
            registry=self.registry,
        )
        gauge.labels(block_size=block_size, num_gpu_blocks=num_blocks, engine="0").set(1)

    def use_transport(self, used: str) -> None:
        """Blocks travel by this transport now; '' where there is no way to the store."""
        for name, gauge in self._transports.items():
            gauge.set(name == used)

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _count_requests(self) -> None:
        self.running = self._gauge("vllm:num_requests_running", "Requests that run.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait.")
        self.cache_usage = self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1."
        )
        success = Counter(
            "vllm:request_success",
            "Requests that ended.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.finished = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in ("length", "stop", "abort")
        }

    def _count_tokens(self) -> None:
        self.prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the engine's own cache."
        )
        self.prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the engine's own cache."
        )
        self.external_queries = self._counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens looked up in the store."
        )
        self.external_hits = self._counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens loaded from the store."
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by source.",
            (*_LABELS, "source"),
            registry=self.registry,
        )
        self.computed_tokens = by_source.labels(**self._labels, source="local_compute")
        self.local_tokens = by_source.labels(**self._labels, source="local_cache_hit")
        self.loaded_tokens = by_source.labels(**self._labels, source="external_kv_transfer")

    def _time_requests(self) -> None:
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN_BUCKETS
        )
        self.between_tokens = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens.", _TOKEN_BUCKETS
        )
        self.whole_request = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time of a request.", _REQUEST_BUCKETS
        )
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "Time spent waiting.", _REQUEST_BUCKETS
        )
        self.prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "Time of the prefill.", _REQUEST_BUCKETS
        )
        self.decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "Time of the decode.", _REQUEST_BUCKETS
        )

    def _count_store(self) -> None:
        self.wrong_blocks = self._counter(
            "kvsim:wrong_blocks", "Loaded blocks whose bytes were not those of their hash."
        )
        self.lost_blocks = self._counter(
            "kvsim:lost_blocks", "Blocks that the store had announced and did not deliver."
        )
        self.saved_blocks = self._counter("kvsim:saved_blocks", "Blocks put into the store.")
        self.store_errors = self._counter("kvsim:store_errors", "Operations that the store failed.")
        transports = Gauge(
            "kvsim:store_transport",
            "How blocks travel to and from the store: 1 for the way in use.",
            (*_LABELS, "transport"),
            registry=self.registry,
        )
        self._transports = {
            name: transports.labels(**self._labels, transport=name) for name in get_args(Kind)
        }
        self.injected = self._counter("kvsim:injected_failures", "Failures made on purpose.")

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, registry=self.registry, buckets=buckets).labels(
            **self._labels
        )
