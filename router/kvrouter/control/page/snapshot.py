"""Makes the document of /status.json, and keeps its history.

It reads existing counters and states once per second; the request path does not know it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from kvrouter import __version__
from kvrouter.control.page.model import (
    SCHEMA,
    EngineCard,
    History,
    Load,
    Minute,
    RankCard,
    RouterCard,
    Snapshot,
)
from kvrouter.control.page.window import BUCKET_S, Growth, Ring
from kvrouter.engines.breaker import BreakerState
from kvrouter.telemetry.metrics import PARTS, Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.control.page.board import Board
    from kvrouter.control.page.events import Events
    from kvrouter.control.page.tiers import StoreWatches
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool
    from kvrouter.telemetry.series import Tally

TICK_S: Final = 1.0
FRESH_S: Final = 0.25
"""All requests within this time get the same document."""
_COUNTERS: Final = (
    "ok", "failed", "prompt_tokens", "engine_tokens", "store_tokens", "output_tokens",
)  # fmt: skip
_ERROR: Final = "error "
_UPSTREAM: Final = "upstream error "
"""What stands before the code or the reason in the names of counters of errors."""
_GAUGES: Final = ("running", "waiting", "engines_up")
_TIMES: Final = tuple(f"ttft_{part}_s" for part in PARTS)
SERIES: Final = (*_COUNTERS, *_GAUGES, "missing_tokens", "begun", "ttft_mean_s", *_TIMES)
"""Names in `History.series`: counts of a bucket, gauges at its end, means of its new answers."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of the document.

    Attributes:
        events: what happened of late.
        condition: `state` and `lacking` of `RouterCard`.
        index_state: how well the router knows an engine's cache; None if it is unknown.
        problem: result of an engine's last probe.
        load: requests at this moment.
        stores: the store's nodes.
        policy: its name.
    """

    pool: EnginePool
    metrics: Metrics
    board: Board
    events: Events
    condition: Callable[[], tuple[str, list[str]]]
    index_state: Callable[[Engine], str | None]
    problem: Callable[[Engine], str | None]
    load: Callable[[], Load]
    stores: StoreWatches
    policy: str


@dataclass(eq=False)
class Snapshots:
    """Makes the document; its owner must `close` it after `start`.

    `clock` is monotonic, `wall` is Unix time.
    """

    sources: Sources
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._started_s, self._started_at_s = self.clock(), self.wall()
        self._ring = Ring(SERIES)
        self._growth: Growth[str] = Growth()
        self._busy: Growth[Engine] = Growth()
        self._bucket_totals = self._note()
        self._bucket_end_s = self.clock() + BUCKET_S
        self._ring_end_s = self.wall()
        self._version = __version__
        self._made: tuple[float, bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to record the history."""
        self._tasks.append(asyncio.create_task(self._keep_recording(), name="status history"))
        asking = self.sources.stores.keep_polling()
        self._tasks.append(asyncio.create_task(asking, name="status store"))

    async def close(self) -> None:
        """Stop recording. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def document(self) -> bytes:
        """The document as JSON."""
        now_s = self.clock()
        if self._made is None or now_s - self._made[0] >= FRESH_S:
            self._made = now_s, msgspec.json.encode(self.snapshot())
        return self._made[1]

    def snapshot(self) -> Snapshot:
        """The document."""
        sources = self.sources
        self._note()
        sources.board.count_live()
        engines, stores = sources.pool.all(), sources.stores.cards()
        return Snapshot(
            schema=SCHEMA,
            time_s=self.wall(),
            router=self._router(),
            load=sources.load(),
            minute=self._minute(),
            models=sources.board.models.cards(engines),
            engines=[self._engine(engine) for engine in engines],
            events=sources.events.cards(),
            flows=sources.board.flows(),
            history=History(BUCKET_S, self._ring_end_s, self._ring.series()),
            requests=sources.board.requests(),
            store=stores[0] if stores else None,
            stores=stores,
        )

    def tick(self) -> None:
        """Record the history; must be called about once per second."""
        now_s, totals = self.clock(), self._note()
        if now_s >= self._bucket_end_s:
            self._close_bucket(totals)
            late_s = now_s - self._bucket_end_s
            for _ in range(min(int(late_s / BUCKET_S), 3 * int(BUCKET_S))):  # the event loop hung
                self._ring.push({})
            self._bucket_end_s = now_s - late_s % BUCKET_S + BUCKET_S

    async def _keep_recording(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def _close_bucket(self, totals: dict[str, float]) -> None:
        before, self._bucket_totals = self._bucket_totals, totals
        bucket: dict[str, float | None] = {n: totals[n] - before[n] for n in _COUNTERS}
        held = totals["engine_tokens"] + totals["store_tokens"]
        held -= before["engine_tokens"] + before["store_tokens"]
        bucket["missing_tokens"] = max(0.0, (bucket["prompt_tokens"] or 0.0) - held)
        load = self.sources.load()
        bucket["running"] = load.running
        bucket["waiting"] = load.waiting + load.waiting_for_engine
        engines = self.sources.pool.all()
        bucket["engines_up"] = sum(e.identity is not None and not e.draining for e in engines)
        begun, parts_s = self.sources.board.take_parts()
        bucket["begun"] = begun
        if begun:
            bucket["ttft_mean_s"] = sum(parts_s) / begun
            bucket |= {n: s / begun for n, s in zip(_TIMES, parts_s, strict=True)}
        self._ring.push(bucket)
        self._ring_end_s = self.wall()

    def _note(self) -> dict[str, float]:
        """Read all counters now, and return those of the router."""
        now_s, pool, board = self.clock(), self.sources.pool, self.sources.board
        board.update()
        board.models.note(now_s, pool.models())
        self._busy.note(now_s, {engine: pool.busy_s(engine) for engine in pool.all()})
        totals = self._totals()
        self._growth.note(now_s, totals)
        return totals

    def _totals(self) -> dict[str, float]:
        metrics, board = self.sources.metrics, self.sources.board
        metrics.settle()
        errors = _by_label(metrics.errors, "code")
        upstream = _by_label(metrics.upstream_errors, "reason")
        models = list(metrics.models)
        return {
            "ok": sum(metrics.success.values()),
            "failed": errors.total(),
            "prompt_tokens": sum(one.prompt_tokens for one in models),
            "engine_tokens": sum(one.hit_engine for one in models),
            "store_tokens": sum(one.hit_store for one in models),
            "output_tokens": board.output_tokens,
            **{_ERROR + code: count for code, count in errors.items()},
            **{_UPSTREAM + reason: count for reason, count in upstream.items()},
        }

    def _router(self) -> RouterCard:
        state, lacking = self.sources.condition()
        return RouterCard(
            version=self._version,
            state=state,
            lacking=lacking,
            models=list(self.sources.pool.models()),
            policy=self.sources.policy,
            started_s=self._started_at_s,
            uptime_s=round(self.clock() - self._started_s, 3),
        )

    def _minute(self) -> Minute:
        board, grown = self.sources.board, self._growth.grown()
        p50_s, p95_s = board.ttft.quantiles(0.5, 0.95)
        waited_p50_s, waited_p95_s = board.waits.quantiles(0.5, 0.95)
        return Minute(
            span_s=round(self._growth.covered_s, 3),
            **{name: int(grown.get(name, 0)) for name in _COUNTERS},
            ttft_p50_s=p50_s,
            ttft_p95_s=p95_s,
            queue_p50_s=waited_p50_s,
            queue_p95_s=waited_p95_s,
            errors=_named(grown, _ERROR),
            upstream_errors=_named(grown, _UPSTREAM),
        )

    def _engine(self, engine: Engine) -> EngineCard:
        identity, pool, span_s = engine.identity, self.sources.pool, self._busy.covered_s
        up = "up" if identity is not None else "away"
        states = {pool.state(target) for target in engine.targets}
        return EngineCard(
            id=engine.address,
            label=engine.label or None,
            role=engine.role.value,
            state="draining" if engine.draining else up,
            down=not engine.draining and pool.down(engine),
            breaker=_worst(states),
            requests=engine.requests,
            tokens=engine.tokens,
            busy=min(1.0, self._busy.of(engine) / span_s) if span_s else None,
            index=self.sources.index_state(engine.targets[0]),
            family=engine.family if identity is not None else None,
            version=identity.version if identity is not None else None,
            block_tokens=identity.block_tokens if identity is not None else None,
            models=list(identity.models if identity is not None else engine.models_before),
            ranks=[self._rank(rank) for rank in engine.ranks],
            problem=self.sources.problem(engine),
        )

    def _rank(self, rank: Engine) -> RankCard:
        return RankCard(
            id=rank.address,
            breaker=self.sources.pool.state(rank),
            requests=rank.requests,
            tokens=rank.tokens,
            index=self.sources.index_state(rank),
        )


def _by_label(tally: Tally, label: str) -> Counter[str]:
    """Its counts by the values of one label."""
    place, counts = tally.labels.index(label), Counter[str]()
    for labels, count in tally.items():
        counts[labels if isinstance(labels, str) else labels[place]] += count
    return counts


def _named(grown: Mapping[str, float], prefix: str) -> dict[str, int]:
    """The counters whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): int(n) for name, n in grown.items() if name.startswith(prefix)
    }


def _worst(states: set[BreakerState | None]) -> str | None:
    """The state of a server by the breakers of its ranks: open if one is open."""
    for state in (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED):
        if state in states:
            return state.value
    return None
