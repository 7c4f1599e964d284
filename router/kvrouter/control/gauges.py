"""Metrics that are read off the router's state when somebody scrapes. Changes nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from kvrouter.engines.breaker import BreakerState
from kvrouter.prefix.events.confidence import Reason
from kvrouter.telemetry.metrics import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvrouter.admission.recompute_budget import RecomputeBudget
    from kvrouter.engines.compatibility import CompatibilityMonitor
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool
    from kvrouter.prefix.events.tracker import CacheTracker
    from kvrouter.prefix.index import PrefixIndex
    from kvrouter.telemetry.metrics import Row

COUNTERS: Final = {
    "tokenize": "Prompts by how their tokens were had: remembered (cache_hits), by the router's "
    "own tokenizer (local), from an engine (engine), or not at all (failed).",
    "store_view": "Waits at the store by their outcome (landed, timeout, store_away, "
    "unknown_manifest), and questions for a prefix that it did not answer (match_failed).",
    "kv_event": "KV events and what was wrong with them, by kind.",
}
"""What counters tell that other objects keep, by name."""
_CIRCUIT: Final = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 1.0, BreakerState.OPEN: 2.0}


class Gauges:
    """What pool, index, budget, event ledger and those who count waiting requests say."""

    def __init__(
        self,
        pool: EnginePool,
        index: PrefixIndex,
        budget: RecomputeBudget,
        compatibility: CompatibilityMonitor,
        tracker: CacheTracker | None,
        *,
        waiting: Mapping[str, Callable[[], int]],
    ) -> None:
        self._pool = pool
        self._index = index
        self._budget = budget
        self._compatibility = compatibility
        self._tracker = tracker
        self._waits = waiting

    def all(self) -> Iterator[Reading]:
        """The gauges."""
        for name, text, read, *labels in (
            ("num_requests_waiting", "Requests that wait to begin.", self._waiting),
            (
                "num_requests_waiting_by_reason",
                "Of these: for others to end (capacity), for a decode engine to come (engine).",
                self._waiting_by_reason,
                "reason",
            ),
            (
                "worker_up",
                "Engines in the pool, or their data-parallel ranks, as HOST:PORT@RANK.",
                self._ups,
                "engine",
                "role",
            ),
            (
                "circuit_state",
                "Breakers: 0 closed, 1 half open, 2 open.",
                self._circuits,
                "engine",
            ),
            ("worker_requests", "Legs under way.", self._loads, "engine"),
            (
                "worker_tokens",
                "Tokens under way on an engine, counted from a request's plan on; of other routers "
                "too.",
                self._tokens,
                "engine",
            ),
            (
                "recompute_tokens",
                "Prompt tokens that decode engines compute for want of their KV.",
                self._recomputed,
            ),
            (
                "sharing_refused",
                "Prefill and decode engines of which the one cannot load the other's KV.",
                self._refusals,
                "prefill",
                "decode",
            ),
        ):
            yield Reading(f"kvrouter:{name}", text, read, labels)
        yield from self._of_index()

    def _of_index(self) -> Iterator[Reading]:
        for name, text, read, *labels in (
            ("kv_index_blocks", "Blocks in the index of the engines' caches.", self._blocks),
            (
                "kv_index_state",
                "How well the cache of an engine is known: exact, degraded, fallback; and why.",
                self._index_states,
                "engine",
                "state",
                "reason",
            ),
            (
                "kv_index_naming",
                "How an engine's KV events name blocks: exact, mapped, unknown, foreign.",
                self._index_namings,
                "engine",
                "naming",
            ),
            ("kv_index_bytes", "Memory of the index of the engines' caches.", self._index_bytes),
        ):
            yield Reading(f"kvrouter:{name}", text, read, labels)

    def counters(self, counts: Mapping[str, Mapping[str, int]]) -> Iterator[Reading]:
        """Those of `COUNTERS` that are there, by kind; each is exposed under its key."""
        for name, counter in counts.items():
            read = partial(_rows, counter)
            yield Reading(f"kvrouter:{name}", COUNTERS[name], read, ["kind"], grows=True)

    def _waiting(self) -> Iterator[Row]:
        yield (), float(sum(count() for count in self._waits.values()))

    def _waiting_by_reason(self) -> Iterator[Row]:
        for reason, count in self._waits.items():
            yield (reason,), float(count())

    def _ups(self) -> Iterator[Row]:
        for engine in self._pool.targets():
            yield (engine.address, engine.role.value), float(engine.identity is not None)

    def _circuits(self) -> Iterator[Row]:
        for engine in self._pool.targets():
            state = self._pool.state(engine)
            if state is not None:
                yield (engine.address,), _CIRCUIT[state]

    def _loads(self) -> Iterator[Row]:
        for engine in self._pool.targets():
            yield (engine.address,), float(engine.requests)

    def _tokens(self) -> Iterator[Row]:
        for engine in self._pool.targets():
            yield (engine.address,), float(engine.tokens)

    def _blocks(self) -> Iterator[Row]:
        yield (), float(len(self._index))

    def _index_states(self) -> Iterator[Row]:
        for engine in self._pool.targets():
            reason = self._tracker.confidence(engine) if self._tracker else Reason.NO_EVENTS
            yield (engine.address, reason.state.value, reason.value), 1.0

    def _index_namings(self) -> Iterator[Row]:
        for engine in self._pool.targets():
            naming = self._tracker.naming(engine) if self._tracker is not None else None
            if naming is not None:
                yield (engine.address, naming.value), 1.0

    def _index_bytes(self) -> Iterator[Row]:
        yield (), float(self._index.memory_bytes)

    def _recomputed(self) -> Iterator[Row]:
        yield (), float(self._budget.tokens)

    def _refusals(self) -> Iterator[Row]:
        for prefill, decode, _ in self._compatibility.incompatible():
            yield (prefill.address, decode.address), 1.0


def index_state(tracker: CacheTracker | None, engine: Engine) -> str:
    """How well the router knows what `engine` holds, in a word."""
    reason = tracker.confidence(engine) if tracker is not None else Reason.NO_EVENTS
    return reason.state.value


def _rows(counter: Mapping[str, int]) -> Iterator[Row]:
    for kind, count in counter.items():
        yield (kind,), float(count)
