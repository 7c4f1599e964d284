"""From timed runs to figures: medians over rounds, percentiles over all calls. GB is 1e9 bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.store.crew import Timed


@dataclass(frozen=True, order=True)
class Key:
    """The work that cells have in common when they are compared."""

    size: str
    op: str
    batch: int
    clients: int

    def __str__(self) -> str:
        return f"{self.op} {self.batch} x {self.size}, {self.clients} client" + (
            "s" if self.clients > 1 else ""
        )


@dataclass(frozen=True)
class Cell:
    """One contender at one size, batch, operation and number of clients."""

    key: Key
    contender: str
    gb_per_s: float
    p10_us: float
    p50_us: float
    p99_us: float
    cpu_s_per_gb: float
    rounds: int
    calls: int


@dataclass(frozen=True)
class Rate:
    """Rate of a sustained operation, by all clients together."""

    contender: str
    clients: int
    per_s: float
    cpu_us: float
    rounds: int


def cell(key: Key, contender: str, moved_bytes: int, runs: Sequence[Timed]) -> Cell:
    """The figures of one cell, whose rounds each moved `moved_bytes`."""
    calls = sorted(call for run in runs for call in run.calls_ns)
    return Cell(
        key,
        contender,
        gb_per_s=moved_bytes / 1e9 / median(run.seconds for run in runs),
        p10_us=percentile(calls, 10) / 1e3,
        p50_us=percentile(calls, 50) / 1e3,
        p99_us=percentile(calls, 99) / 1e3,
        cpu_s_per_gb=median(run.cpu_s for run in runs) / (moved_bytes / 1e9),
        rounds=len(runs),
        calls=len(calls),
    )


def rate(contender: str, clients: int, runs: Sequence[Timed]) -> Rate:
    """Units per second, and CPU of clients and server for each unit."""
    return Rate(
        contender,
        clients,
        per_s=median(run.units / run.seconds for run in runs),
        cpu_us=median(run.cpu_s / max(run.units, 1) for run in runs) * 1e6,
        rounds=len(runs),
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` of 100 of them do not exceed (nearest rank)."""
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(rank, 1) - 1]
