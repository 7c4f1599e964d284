"""What the demo prints: times as clients saw them, tokens as the engines counted them. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kvrouter.tools.demo.workload import Reply

__all__ = ["Counted", "hit_rate", "source_table", "ttft_line"]

_SOURCES = {
    "local_compute": "computed",
    "local_cache_hit": "own",
    "external_kv_transfer": "store",
}
_BY_SOURCE = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE
)
_WRONG = re.compile(r"^kvsim:wrong_blocks_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Counted:
    """Prompt tokens of an engine by where their KV came from, and blocks that were wrong."""

    computed: int = 0
    own: int = 0
    store: int = 0
    wrong_blocks: int = 0

    @classmethod
    def read(cls, exposition: str) -> "Counted":
        """Read an engine's /metrics."""
        found = {
            _SOURCES[source]: int(float(value))
            for source, value in _BY_SOURCE.findall(exposition)
            if source in _SOURCES
        }
        wrong = sum(int(float(value)) for value in _WRONG.findall(exposition))
        return cls(**found, wrong_blocks=wrong)

    @property
    def total(self) -> int:
        """All prompt tokens that the engine needed the KV of."""
        return self.computed + self.own + self.store

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(
            self.computed + other.computed,
            self.own + other.own,
            self.store + other.store,
            self.wrong_blocks + other.wrong_blocks,
        )

    def __sub__(self, other: "Counted") -> "Counted":
        return Counted(
            self.computed - other.computed,
            self.own - other.own,
            self.store - other.store,
            self.wrong_blocks - other.wrong_blocks,
        )


def ttft_line(name: str, replies: Sequence[Reply]) -> str:
    """Median and 95th percentile of the time to first token of answers that went well."""
    times = sorted(reply.ttft_s for reply in replies if not reply.problem)
    if not times:
        return f"{name:<6} no answer"
    late = times[min(len(times) - 1, int(len(times) * 0.95))]
    tokens = round(sum(reply.prompt_tokens for reply in replies) / len(replies))
    return (
        f"{name:<6} {len(replies):>4} requests of about {tokens} prompt tokens:  "
        f"TTFT median {median(times) * 1000:6.1f} ms   p95 {late * 1000:6.1f} ms"
    )


def speedup(cold: Sequence[Reply], warm: Sequence[Reply]) -> float:
    """How many times sooner the first token came."""
    pair = [[reply.ttft_s for reply in each if not reply.problem] for each in (cold, warm)]
    return median(pair[0]) / median(pair[1]) if all(pair) else 0.0


def hit_rate(counted: Counted) -> float:
    """Share of prompt tokens whose KV did not have to be computed."""
    return 1 - counted.computed / counted.total if counted.total else 0.0


def source_table(engines: Mapping[str, Counted], notes: Mapping[str, str]) -> list[str]:
    """A line per engine, and their sum: tokens computed, held already, loaded from the store."""
    lines = [f"{'prompt tokens':<12}{'computed':>12}{'own cache':>12}{'from store':>12}"]
    rows = [*engines.items(), ("all", sum(engines.values(), Counted()))]
    for name, counted in rows:
        numbers = f"{counted.computed:>12,}{counted.own:>12,}{counted.store:>12,}"
        lines.append(f"{name:<13}{numbers[1:]}   {notes.get(name, '')}".rstrip())
    return lines
