"""The figures of a run, with the rows and JSON names of `vllm bench serve`.

Source: calculate_metrics and benchmark in vllm/benchmarks/serve.py of vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrouter.tools.bench.settings import BenchSettings, Name
    from kvrouter.tools.timed_stream import TimedAnswer

WIDTH: Final = 50
TITLES: Final[Mapping[Name, tuple[str, str]]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


@dataclass(frozen=True)
class Figures:
    """The figures of a run. Times are in milliseconds, rates per second."""

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    times_ms: Mapping[Name, Sequence[float]]

    @classmethod
    def of(cls, answers: Sequence[TimedAnswer], duration_s: float) -> Figures:
        """The figures of all answers of a run that took `duration_s`."""
        well = [each for each in answers if not each.error]
        longer = [each for each in well if each.output_tokens > 1]
        per_token = [(e.latency_s - e.ttft_s) / (e.output_tokens - 1) for e in longer]
        times: dict[Name, Sequence[float]] = {
            "ttft": [each.ttft_s for each in well],
            "tpot": per_token,
            "itl": [gap for each in well for gap in each.gaps_s],
            "e2el": [each.latency_s for each in well],
        }
        tokens, requests = _by_second(well)
        return cls(
            duration=duration_s,
            completed=len(well),
            failed=len(answers) - len(well),
            total_input_tokens=sum(each.prompt_tokens for each in well),
            total_output_tokens=sum(each.output_tokens for each in well),
            max_output_tokens_per_s=float(max(tokens, default=0)),
            max_concurrent_requests=max(requests, default=0),
            times_ms={name: [value * 1000 for value in each] for name, each in times.items()},
        )

    def as_json(self, settings: BenchSettings) -> dict[str, float | int | str | None]:
        """The figures under the names of vLLM's result file."""
        found: dict[str, float | int | str | None] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.completed / self.duration,
            "output_throughput": self.total_output_tokens / self.duration,
            "total_token_throughput": self.tokens / self.duration,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent_requests,
        }
        for name in settings.percentile_metrics:
            values = self.times_ms[name] or (0.0,)
            found[f"mean_{name}_ms"] = fmean(values)
            found[f"median_{name}_ms"] = median(values)
            found[f"std_{name}_ms"] = pstdev(values)
            for percent in settings.metric_percentiles:
                found[f"p{percent:g}_{name}_ms"] = percentile(values, percent)
        return found

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers."""
        return self.total_input_tokens + self.total_output_tokens

    def rows(self, settings: BenchSettings) -> list[str]:
        """The printed block, without its last line."""
        lines = [
            f"{' Serving Benchmark Result ':=^{WIDTH}}",
            row("Successful requests:", self.completed),
            row("Failed requests:", self.failed),
        ]
        if settings.max_concurrency is not None:
            lines.append(row("Maximum request concurrency:", settings.max_concurrency))
        if settings.request_rate != float("inf"):
            lines.append(row("Request rate configured (RPS):", settings.request_rate))
        lines += [
            row("Benchmark duration (s):", self.duration),
            row("Total input tokens:", self.total_input_tokens),
            row("Total generated tokens:", self.total_output_tokens),
            row("Request throughput (req/s):", self.completed / self.duration),
            row("Output token throughput (tok/s):", self.total_output_tokens / self.duration),
            row("Peak output token throughput (tok/s):", self.max_output_tokens_per_s),
            row("Peak concurrent requests:", float(self.max_concurrent_requests)),
            row("Total token throughput (tok/s):", self.tokens / self.duration),
        ]
        for name in settings.percentile_metrics:
            lines += self._times(name, settings.metric_percentiles)
        return lines

    def _times(self, name: Name, percentiles: Sequence[float]) -> list[str]:
        short, title = TITLES[name]
        values = self.times_ms[name] or (0.0,)
        return [
            f"{title:-^{WIDTH}}",
            row(f"Mean {short} (ms):", fmean(values)),
            row(f"Median {short} (ms):", median(values)),
            *(row(f"P{each:g} {short} (ms):", percentile(values, each)) for each in percentiles),
        ]


def row(name: str, value: float) -> str:
    """One line of the block."""
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated between neighbours, as numpy.percentile does by default."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low, high = ordered[floor(at)], ordered[ceil(at)]
    return low + (high - low) * (at - floor(at))


def _by_second(well: Sequence[TimedAnswer]) -> tuple[list[int], list[int]]:
    """Tokens that arrived, and requests in flight, in each second since the first was sent."""
    if not well:
        return [], []
    begin_s = min(each.started_s for each in well)
    seconds = ceil(max(each.started_s + each.latency_s for each in well) - begin_s) + 1
    tokens, requests = [0] * seconds, [0] * seconds
    for each in well:
        at_s = each.started_s - begin_s
        for second in range(int(at_s), int(at_s + each.latency_s) + 1):
            requests[second] += 1
        at_s += each.ttft_s
        tokens[int(at_s)] += 1
        for gap_s in each.gaps_s:
            at_s += gap_s
            tokens[min(int(at_s), seconds - 1)] += 1
    return tokens, requests
