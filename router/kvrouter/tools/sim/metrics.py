"""The metrics of a simulated engine: vLLM's names, and `kvsim:` for what only a simulator knows.

Names and labels: vllm/v1/metrics/loggers.py of vLLM 0.32.
"""

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrouter.telemetry.series import GAP_BUCKETS, REQUEST_BUCKETS, TTFT_BUCKETS
from kvrouter_store.connection.address import Kind

_LABELS = ("model_name", "engine")


class SimMetrics:
    """Every series of one engine, in a registry of its own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._add_requests()
        self._add_tokens()
        self._add_times()
        self._add_store()

    def describe_cache(self, block_size: int, num_blocks: int) -> None:
        """Publish the shape of the cache in labels, as vLLM does."""
        gauge = Gauge(
            "vllm:cache_config_info",
            "Information of the KV cache.",
            ("block_size", "num_gpu_blocks", "engine"),
            registry=self.registry,
        )
        gauge.labels(block_size=block_size, num_gpu_blocks=num_blocks, engine="0").set(1)

    def use_transport(self, used: str) -> None:
        """Set the transport in use; '' without a connection to the store."""
        for name, gauge in self._transports.items():
            gauge.set(name == used)

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _add_requests(self) -> None:
        self.running = self._gauge("vllm:num_requests_running", "Requests that run.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait.")
        self.cache_usage = self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1."
        )
        labels = (*_LABELS, "finished_reason")
        success = Counter(
            "vllm:request_success", "Requests that ended.", labels, registry=self.registry
        )
        self.finished = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in ("length", "stop", "abort")
        }

    def _add_tokens(self) -> None:
        own, store = "in the engine's own cache.", "in the store."
        self.prefix_queries = self._counter(
            "vllm:prefix_cache_queries", f"Prompt tokens looked up {own}"
        )
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", f"Prompt tokens found {own}")
        self.external_queries = self._counter(
            "vllm:external_prefix_cache_queries", f"Prompt tokens looked up {store}"
        )
        self.external_hits = self._counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens loaded from the store."
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        labels = (*_LABELS, "source")
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by source.",
            labels,
            registry=self.registry,
        )
        self.computed_tokens, self.local_tokens, self.loaded_tokens = (
            by_source.labels(**self._labels, source=source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        )

    def _add_times(self) -> None:
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS
        )
        self.between_tokens = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens.", GAP_BUCKETS
        )
        self.whole_request, self.queue_time, self.prefill_time, self.decode_time = (
            self._histogram(f"vllm:{name}_seconds", text, REQUEST_BUCKETS)
            for name, text in (
                ("e2e_request_latency", "Time of a request."),
                ("request_queue_time", "Time spent waiting."),
                ("request_prefill_time", "Time of the prefill."),
                ("request_decode_time", "Time of the decode."),
            )
        )

    def _add_store(self) -> None:
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
        family = Histogram(name, text, _LABELS, registry=self.registry, buckets=buckets)
        return family.labels(**self._labels)
