"""Makes the document of /status.json.

It reads existing counters and states once per second; the request path does not know it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from kvrouter import __version__
from kvrouter.control.admin import worker_card
from kvrouter.control.page.board import MINUTE_S, Board
from kvrouter.control.page.model import SCHEMA, Load, Minute, RouterCard, Snapshot
from kvrouter.fates.fate import REUSED, Fate
from kvrouter.fates.recent import in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.control.page.events import Events
    from kvrouter.control.page.tiers import StoreWatches
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool
    from kvrouter.telemetry.metrics import Metrics

Name = TypeVar("Name")

TICK_S: Final = 1.0
FRESH_S: Final = 0.25  # all requests within this time get the same document
_COUNTERS: Final = (
    "ok", "failed", "prompt_tokens", "engine_tokens", "store_tokens", "output_tokens",
)  # fmt: skip


class Growth(Generic[Name]):
    """Growth of counters, which never fall, within the last minute."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[Name, float]]] = deque()

    def note(self, now_s: float, totals: Mapping[Name, float]) -> None:
        """Add a reading; must be called about once per second."""
        self._readings.append((now_s, totals))
        while len(self._readings) > 2 and self._readings[1][0] <= now_s - MINUTE_S:
            self._readings.popleft()

    def of(self, name: Name) -> float:
        """Growth of the counter `name`."""
        if not self._readings:
            return 0.0
        first, last = self._readings[0][1], self._readings[-1][1]
        return last.get(name, 0.0) - first.get(name, 0.0)

    @property
    def covered_s(self) -> float:
        """Time between the oldest and the newest reading."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0


@dataclass(eq=False, kw_only=True)
class Snapshots:
    """Makes the document of what the router has; its owner must `close` it after `start`."""

    pool: EnginePool
    metrics: Metrics
    board: Board
    events: Events  # what happened of late
    condition: Callable[[], tuple[str, list[str]]]  # `state` and `lacking` of `RouterCard`
    index_state: Callable[[Engine], str | None]  # how well its cache is known; None: unknown
    problem: Callable[[Engine], str | None]  # result of an engine's last probe
    load: Callable[[], Load]  # requests at this moment
    stores: StoreWatches  # the store's nodes
    store_sizes: Callable[[], dict[int, float]]  # what stores of these bytes would find
    policy: str  # its name
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic
    wall: Callable[[], float] = time.time  # Unix time

    def __post_init__(self) -> None:
        self._started_s, self._started_at_s = self.clock(), self.wall()
        self._growth: Growth[str] = Growth()
        self._busy: Growth[Engine] = Growth()
        self.tick()
        self._made: tuple[float, bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to read the counters, and to ask the store."""
        self._tasks.append(asyncio.create_task(self._keep_reading(), name="status counters"))
        asking = self.stores.keep_polling()
        self._tasks.append(asyncio.create_task(asking, name="status store"))

    async def close(self) -> None:
        """Stop reading. Idempotent."""
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
        return Snapshot(
            schema=SCHEMA,
            time_s=self.wall(),
            router=self._router(),
            load=self.load(),
            minute=self._minute(),
            engines=[self._engine(engine) for engine in self.pool.all()],
            events=self.events.cards(),
            flows=self.board.flows(),
            requests=self.board.requests(),
            stores=self.stores.cards(),
            store_sizes=self.store_sizes(),
            fates=[
                _fate_card(fate, tokens)
                for fate, tokens in in_order({f: int(self._growth.of(f)) for f in Fate}).items()
            ],
        )

    def tick(self) -> None:
        """Read all counters now; must be called about once per second."""
        now_s, pool = self.clock(), self.pool
        self._busy.note(now_s, {engine: pool.busy_s(engine) for engine in pool.all()})
        self._growth.note(now_s, self._totals())

    async def _keep_reading(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def _totals(self) -> dict[str, float]:
        metrics = self.metrics
        metrics.settle()
        models = list(metrics.models)
        return {
            "ok": sum(metrics.success.values()),
            "failed": sum(metrics.errors.values()),
            "prompt_tokens": sum(one.prompt_tokens for one in models),
            "engine_tokens": sum(one.hit_engine + one.hit_lower for one in models),
            "store_tokens": sum(one.hit_store for one in models),
            "output_tokens": self.board.output_tokens(),
            "begun": sum(one.ttft.count for one in models),
            "ttft_s": sum(one.ttft.buckets.sum for one in models),
            **{fate: sum(one.fates.get(fate, 0) for one in models) for fate in Fate},
        }

    def _router(self) -> RouterCard:
        state, lacking = self.condition()
        return RouterCard(
            version=__version__,
            state=state,
            lacking=lacking,
            models=list(self.pool.models()),
            policy=self.policy,
            started_s=self._started_at_s,
            uptime_s=round(self.clock() - self._started_s, 3),
        )

    def _minute(self) -> Minute:
        grown = self._growth.of
        begun = grown("begun")
        return Minute(
            span_s=round(self._growth.covered_s, 3),
            **{name: int(grown(name)) for name in _COUNTERS},
            ttft_mean_s=grown("ttft_s") / begun if begun else None,
        )

    def _engine(self, engine: Engine) -> dict[str, Any]:
        identity, span_s = engine.identity, self._busy.covered_s
        return {
            **worker_card(engine, self.pool, self.problem(engine), self.index_state),
            "models": identity.models if identity is not None else engine.models_before,
            "label": engine.label or None,
            "down": not engine.draining and self.pool.down(engine),
            "busy": min(1.0, self._busy.of(engine) / span_s) if span_s else None,
            "family": engine.family if identity is not None else None,
            "version": identity.version if identity is not None else None,
            "block_tokens": identity.block_tokens if identity is not None else None,
        }


def _fate_card(fate: Fate, tokens: int) -> dict[str, Any]:
    kind = "reused" if fate in REUSED else "lost" if fate.remedy else "needed"
    return {"fate": fate, "words": fate.words, "tokens": tokens, "kind": kind}
