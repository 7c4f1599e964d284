"""Load of engines, pools and models: gauges that an autoscaler can follow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvrouter.engines.breaker import BreakerState
from kvrouter.engines.engine import Engine, Role
from kvrouter.telemetry.by_model import MODEL
from kvrouter.telemetry.series import Reading, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvrouter.engines.pool import EnginePool
    from kvrouter.telemetry.metrics import Metrics

    Loads = Callable[[], Iterable[tuple[str, "Load"]]]

SATURATION: Final = (
    "Tokens in flight over the tokens that the KV caches hold, of engines that tell how many: 1 "
    "means full, more that requests wait in engines. A request counts its whole prompt and, to "
    "decode, its max_tokens."
)


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
