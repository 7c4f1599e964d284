"""Metrics that are read from the router's state at each scrape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvrouter.engines.breaker import BreakerState
from kvrouter.engines.engine import Engine, Role
from kvrouter.prefix.events.confidence import Reason
from kvrouter.telemetry.by_model import MODEL
from kvrouter.telemetry.series import Reading, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvrouter.admission.held import RecomputeBudget
    from kvrouter.engines.compatibility import CompatibilityMonitor
    from kvrouter.engines.pool import EnginePool
    from kvrouter.prefix.events.tracker import CacheTracker
    from kvrouter.prefix.index import PrefixIndex
    from kvrouter.prefix.stores.base import StoreView
    from kvrouter.prefix.stores.node_index import NodeIndex
    from kvrouter.routing.planner.queue import PrefillQueue
    from kvrouter.telemetry.metrics import Metrics

    Loads = Callable[[], Iterable[tuple[str, "Load"]]]

COUNTERS: Final = {
    "tokenize": "Prompts by the source of their tokens: remembered (cache_hits), the router's own "
    "tokenizer (local), an engine (engine), or none: it failed, or nobody answered in time (late).",
    "store_view": "Waits at single nodes of the store by outcome (landed, timeout, store_away, "
    "unknown_manifest), and prefix lookups without an answer (match_failed).",
    "kv_event": "KV events and what was wrong with them, by kind.",
    "store_kv_event": "KV events of store nodes and what was wrong with them, by kind.",
}
"""Help of counters that other objects keep."""
_CIRCUIT: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
SATURATION: Final = (
    "Tokens in flight over the tokens that the KV caches hold, of engines that tell how many: 1 "
    "means full, more that requests wait in engines. A request counts its whole prompt and, to "
    "decode, its max_tokens."
)


def counters(counts: Mapping[str, Mapping[str, int]]) -> Iterator[Reading]:
    """Counters of `COUNTERS` by kind, each under its name."""
    for name, counter in counts.items():
        yield Reading(f"kvrouter:{name}", COUNTERS[name], counter.items, ["kind"], grows=True)


def request_gauges(
    waits: Mapping[str, Callable[[], int]], budget: RecomputeBudget
) -> Iterator[Reading]:
    """Gauges of waiting requests (`waits` counts them by reason) and of recomputed prompts."""
    yield _gauge(
        "num_requests_waiting",
        "Requests that wait to begin.",
        lambda: sum(count() for count in waits.values()),
    )
    yield _gauge(
        "num_requests_waiting_by_reason",
        "The same by reason: for other requests to end (capacity), for a decode engine (engine), "
        "for a prefill engine (prefill).",
        lambda: ((reason, count()) for reason, count in waits.items()),
        "reason",
    )
    yield _gauge(
        "recompute_tokens",
        "Prompt tokens that decode engines compute because their KV is missing.",
        lambda: budget.tokens,
    )
    yield _gauge(
        "recompute_max_tokens",
        "Limit of these tokens: --recompute-budget-tokens.",
        lambda: budget.limit_tokens,
    )


def prefill_queue_gauges(queue: PrefillQueue | None) -> Iterator[Reading]:
    """What tells whether prompts of the queue need more engines; 0 without a queue."""
    yield _gauge(
        "prefill_queue_seconds",
        "Estimated work of the prompts that wait for a prefill engine, for each engine "
        "(--policy planner).",
        lambda: queue.wait_s() if queue is not None else 0.0,
    )
    yield Reading(
        "kvrouter:streams_stalled_seconds",
        "Estimated seconds for which streams paused while their decode engine computed prompts "
        "(--policy planner).",
        lambda: queue.stalled_s if queue is not None else 0.0,
        grows=True,
    )


def store_gauges(store: StoreView, sizes: Callable[[], Mapping[int, float]]) -> Iterator[Reading]:
    """Gauges of the store's nodes; `sizes` tells what stores of other sizes would find."""
    yield _gauge(
        "store_size_found_ratio",
        "Share of the prompt tokens that a store of so many bytes would find, estimated from a "
        "sample of the blocks; prompts of a day ago count half.",
        lambda: ((str(size), found) for size, found in sizes().items()),
        "store_bytes",
    )
    yield _gauge(
        "store_connected",
        "Whether the router is connected to a node of the store.",
        lambda: (((client.url,), float(client.connected)) for client in store.clients),
        "node",
    )


def node_index_gauges(index: NodeIndex | None) -> Iterator[Reading]:
    """What is known of nodes of the store by their events; nothing without an index."""
    if index is None:
        return
    yield from counters({"store_kv_event": index.counts})
    yield _gauge(
        "store_index_state",
        "How well the router knows a node by its events, and why; it asks those that are not "
        "exact.",
        lambda: (((url, each.state.value, each.value), 1) for url, each in index.states()),
        *("node", "state", "reason"),
    )


def engine_gauges(pool: EnginePool, compatibility: CompatibilityMonitor) -> Iterator[Reading]:
    """Gauges of engines and their ranks."""
    yield _gauge(
        "worker_up",
        "Whether an engine, or a data-parallel rank (HOST:PORT@RANK), is in the pool.",
        lambda: (
            ((each.address, each.role.value), each.identity is not None) for each in pool.targets()
        ),
        *("engine", "role"),
    )
    yield _gauge(
        "circuit_state",
        "Breakers: 0 closed, 1 half open, 2 open.",
        lambda: (
            (each.address, _CIRCUIT[state])
            for each in pool.targets()
            if (state := pool.state(each)) is not None
        ),
        "engine",
    )
    yield _gauge(
        "pair_circuit_state",
        "Breakers of pairs of engines whose last hand-over failed: 0 closed, 1 half open, 2 open.",
        lambda: (
            ((prefill.address, decode.address), _CIRCUIT[breaker.state])
            for prefill, decode, breaker in pool.pairs
        ),
        *("prefill", "decode"),
    )
    yield _gauge(
        "sharing_refused",
        "Pairs of a prefill and a decode engine that cannot load each other's KV.",
        lambda: (((p.address, d.address), 1) for p, d, _ in compatibility.incompatible()),
        *("prefill", "decode"),
    )


def index_gauges(
    pool: EnginePool, index: PrefixIndex, tracker: CacheTracker | None
) -> Iterator[Reading]:
    """Gauges of the index of the engines' caches."""
    yield _gauge(
        "kv_index_blocks",
        "Blocks in the index of the engines' caches.",
        lambda: len(index),
    )
    yield _gauge(
        "kv_index_bytes",
        "Memory of these blocks: their share of kv_index_max_bytes.",
        lambda: index.use.bytes,
    )
    yield _gauge(
        "kv_index_max_bytes",
        "Memory of the index with --index-blocks blocks. As blocks are spread over it, the system "
        "gives most of it after few.",
        lambda: index.memory_bytes,
    )
    yield _gauge(
        "kv_index_state",
        "How well the router knows the cache of an engine (exact, degraded, fallback), and why.",
        lambda: (
            ((each.address, reason.state.value, reason.value), 1)
            for each in pool.targets()
            if (reason := _confidence(tracker, each))
        ),
        *("engine", "state", "reason"),
    )
    yield _gauge(
        "kv_index_naming",
        "How an engine's KV events name blocks: exact, mapped, unknown, foreign.",
        lambda: (
            ((each.address, naming.value), 1)
            for each in pool.targets()
            if tracker is not None and (naming := tracker.naming(each)) is not None
        ),
        *("engine", "naming"),
    )


def index_state(tracker: CacheTracker | None, engine: Engine) -> str:
    """How well the router knows the cache of `engine`, in a word."""
    return _confidence(tracker, engine).state.value


def _confidence(tracker: CacheTracker | None, engine: Engine) -> Reason:
    return tracker.confidence(engine) if tracker is not None else Reason.NO_EVENTS


def _gauge(
    name: str, text: str, read: Callable[[], float | Iterable[Row]], *labels: str
) -> Reading:
    return Reading(f"kvrouter:{name}", text, read, labels)


@dataclass(slots=True)
class Load:
    """Sums over engines."""

    requests: int = 0
    waiting: int = 0
    tokens: int = 0
    kv_tokens: int = 0  # what the caches of engines hold that tell it
    told_tokens: int = 0  # those of `tokens` that are on such engines

    def add(self, engine: Engine) -> Load:
        """Count `engine`, and return itself."""
        kv_tokens = engine.kv_tokens
        self.requests += engine.requests
        self.waiting += engine.legs - engine.requests
        self.tokens += engine.tokens
        if kv_tokens is not None:
            self.kv_tokens += kv_tokens
            self.told_tokens += engine.tokens
        return self


def load_gauges(
    pool: EnginePool, metrics: Metrics, waiting: Callable[[], int]
) -> Iterator[Reading]:
    """Gauges of engines, pools and models; `waiting` counts requests that wait to begin."""
    yield from _gauges(
        "worker",
        "engine",
        lambda: ((each.address, Load().add(each)) for each in pool.targets()),
        "Legs in flight.",
        "Legs that wait, planned for an engine, until the prompt is prefilled and landed.",
        "Tokens in flight on an engine from this and other routers; a request counts from its "
        "plan on.",
    )
    yield from _gauges(
        "pool",
        "role",
        partial(_pools, pool, waiting),
        "Legs in flight on the engines of a pool (prefill, decode); an engine of both counts in "
        "both.",
        "The same of legs that wait, and requests that wait to begin.",
        "Tokens in flight on the engines of a pool.",
    )
    yield from _gauges(
        "model",
        MODEL,
        partial(_models, pool, metrics),
        "Requests for a model in flight.",
        "Requests for a model that wait to begin.",
        "Tokens in flight on the engines that serve a model; all models of an engine share them.",
    )


def _gauges(  # noqa: PLR0917
    what: str, label: str, loads: Loads, requests: str, waiting: str, tokens: str
) -> Iterator[Reading]:
    """The four gauges of one kind of loads; the texts are their help."""

    def rows(count: Callable[[Load], float]) -> Iterator[Row]:
        return ((name, count(load)) for name, load in loads())

    def saturation() -> Iterator[Row]:
        for name, load in loads():
            if load.kv_tokens:
                yield name, load.told_tokens / load.kv_tokens

    for name, text, read in (
        ("requests", requests, lambda: rows(lambda load: load.requests)),
        ("waiting", waiting, lambda: rows(lambda load: load.waiting)),
        ("tokens", tokens, lambda: rows(lambda load: load.tokens)),
        ("saturation", SATURATION, saturation),
    ):
        yield Reading(f"kvrouter:{what}_{name}", text, read, [label])


def _ready(pool: EnginePool) -> list[Engine]:
    """What takes legs: engines that leave, or whose breaker is open, add no capacity."""
    away = (None, BreakerState.OPEN)
    return [e for e in pool.targets() if pool.state(e) not in away and not e.server.draining]


def _pools(pool: EnginePool, waiting: Callable[[], int]) -> Iterator[tuple[str, Load]]:
    engines = _ready(pool)
    for role in (Role.PREFILL, Role.DECODE):
        if pool.has_role(role):
            load = Load(waiting=waiting())
            for engine in engines:
                if engine.role.serves(role):
                    load.add(engine)
            yield role.value, load


def _models(pool: EnginePool, metrics: Metrics) -> Iterator[tuple[str, Load]]:
    loads = {one.label: Load() for one in metrics.models}
    for engine in _ready(pool):
        names = engine.identity.models if engine.identity is not None else ()
        for label in {metrics.of(name).label for name in names}:
            loads.setdefault(label, Load()).add(engine)
    for one in metrics.models:
        load = loads[one.label]
        load.requests, load.waiting = one.running, one.waiting  # not those of the engine's others
        yield one.label, load
