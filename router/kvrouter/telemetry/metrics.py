"""All counters and histograms of the router, for Prometheus."""

from __future__ import annotations

from platform import python_version
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from kvrouter import __version__
from kvrouter.telemetry.by_model import MODEL, ByModel
from kvrouter.telemetry.series import (
    OVERHEAD_BUCKETS,
    REQUEST_BUCKETS,
    TTFT_BUCKETS,
    Histogram,
    Histograms,
    Reading,
    Tally,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """All metrics of one router. Names follow vLLM's (`vllm:` -> `kvrouter:`) where it has them."""

    def __init__(self) -> None:
        self.running = 0  # requests in flight
        # Counts requests that have ended since the last call; called before a scrape.
        self.settle: Callable[[], None] = lambda: None
        self.models = ByModel()  # what is counted by model
        self.of = self.models.of  # what is counted of a model; `ByModel.of`
        self._name_times()
        self._name_ends()
        self._name_counts()
        self._name_handovers()
        build = __version__, python_version()
        self._more: list[Reading | Tally] = [
            Reading("kvrouter:num_requests_running", "Requests in flight.", lambda: self.running),
            Reading(
                "kvrouter:build_info",
                "Always 1; the labels are the versions of kvrouter and Python.",
                lambda: [(build, 1)],
                ["version", "python"],
            ),
        ]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def _name_times(self) -> None:
        self.ttft_parts = Histograms(
            "kvrouter:time_to_first_token_part_seconds",
            "Parts of the time to the first token, which add up to it: queue (wait for its turn or "
            "for an engine), tokenise, plan (parse, hash, look up the store, choose), prefill "
            "(leg), landing (of its KV), decode (leg, until its first byte).",
            TTFT_BUCKETS,
            "part",
            PARTS,
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
            ["finished_reason", MODEL],
        )
        self.errors = Tally(
            "kvrouter:request_errors",
            "Failed requests, by the status that clients got; 499: the client left.",
            ["code", MODEL],
        )
        self.cut_off = Tally(
            "kvrouter:requests_cut_off",
            "Requests that the router cut off because it stopped: stream (the answer had begun and "
            "ended with an error event) or none (answered 503).",
            ["answer"],
        )
        self.passed_through = Tally(
            "kvrouter:passed_through",
            "Requests to endpoints that one engine answers, by the status that clients got. "
            "Messages and responses count in the metrics of all requests for text, too.",
            ["path", "code", MODEL],
        )

    def _name_counts(self) -> None:
        self.aliases = Tally(
            "kvrouter:alias_requests",
            "Requests for an alias (--model-alias), by the model that they got.",
            ["alias", "model"],
        )
        self.upstream_errors = Tally(
            "kvrouter:upstream_errors",
            "Failed legs by reason (docs/failures.md): a refused or broken connection, a status, a "
            "time-out, an unusable answer, a full engine, a dead one, the router's own limits.",
            ["leg", "reason"],
        )
        self.engines_left = Tally(
            "kvrouter:engines_left",
            "Engines that left, by cause: no sign of life (silent), no progress (stalled), a bad "
            "answer to health checks (check), a refused connection (refused), or another engine is "
            "there (changed).",
            ["cause"],
        )
        self.plans = Tally(
            "kvrouter:plans",
            "Plans by reason; prefill: both legs, other reasons: one leg.",
            ["why"],
        )
        self.chosen = Tally(
            "kvrouter:engines_chosen",
            "Engines chosen to answer, by what spoke for them: a beginning of the prompt that they "
            "hold by their KV events (exact), or probably, by where requests went (learnt); the "
            "place of the session, where no engine holds any (session); else load or turn alone "
            "(load).",
            ["by"],
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
            "Prefill legs after which no block of the prompt came to decode, by cause. The engine "
            "named no KV (not_named), or put none: its store is away (engine_store_away), its "
            "memory full (host_memory), its settings or the request forbid it (not_shared), the "
            "state or window at their end was not kept (no_tail), or it does not say (not_put). "
            "The prompt has no whole block (short_prompt) or its tokens are not known "
            "(unknown_tokens). They did not land (timeout, store_away, unknown_manifest), or went "
            "again (evicted).",
            ["cause"],
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
        self.usage_mismatch = Tally(
            "kvrouter:usage_mismatch", "Answers whose legs counted different prompt tokens."
        )

    def add(self, metric: Reading | Tally) -> None:
        """Expose one more metric."""
        self._more.append(metric)

    def collect(self) -> Iterator[Metric]:
        """All metrics, for the registry of prometheus_client."""
        self.settle()
        for metric in (*self.models.series, *vars(self).values(), *self._more):
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
