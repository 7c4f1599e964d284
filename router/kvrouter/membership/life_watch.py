"""Finds engines that are dead though nothing says so: they leave, and their legs end.

Open connections know when a byte last came, so that nothing is done per streamed event.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.engines.life import Look
from kvrouter.http.deadlines import NEVER
from kvrouter.http.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from kvrouter.engines.families import Families
    from kvrouter.engines.life import Lives
    from kvrouter.engines.pool import Cause, EnginePool
    from kvrouter.http.client.pool import ClientConnection, ConnectionPool
    from kvrouter.membership.probe_client import ProbeClient

    Streams = dict[ClientConnection, tuple[float, int]]
    """When each stream last gave an event, and how many so far."""

TICK_S: Final = 0.25
_LAST_S: Final = 0.6
"""From leaving to the end of the legs: who asks /health learns the cause before the effect."""
_LATE_S: Final = 1.0
"""A tick so late says that the router itself stood still: what engines sent is still to be read."""
_TOKENS: Final = re.compile(
    rb"^(?:vllm|sglang):(?:prompt|generation|realtime)_tokens_total(?:\{(.*)\})? (\d\S*)",
    re.MULTILINE,
)
_RANK: Final = re.compile(rb'\b(?:engine|dp_rank)="(\d+)"')

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class LifeWatch:
    """Looks after all engines of `pool`; its owner calls `start`, then `close`."""

    pool: EnginePool
    lives: Lives
    client: ProbeClient  # asks engines for their counters
    families: Families  # know how to try a core
    connections: Callable[[Engine], ConnectionPool]  # all connections to a target
    # When a target last sent KV events, on the clock of `lives`; None: never.
    events_s: Callable[[Engine], float | None]

    def __post_init__(self) -> None:
        self._seen: dict[Engine, Streams] = {}
        self._looks: dict[Engine, asyncio.Task[None]] = {}
        self._spared: set[Engine] = set()
        self._ends_s: dict[Engine, float] = {}
        self._ticks: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._ticks = asyncio.create_task(self._run(), name="life watch")

    async def close(self) -> None:
        """Stop. Idempotent."""
        tasks = [task for task in (self._ticks, *self._looks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def engine_joined(self, target: Engine) -> None:
        """What was known of its core is old; legs that it had when it was dead end now at last."""
        self.lives.restarted(target)
        self._spared.discard(target.server)
        if self._ends_s.pop(target.server, None) is not None:
            self._end(target.server)

    def forget(self, target: Engine) -> None:
        """`target` will not come back."""
        self._spared.discard(target)
        self._ends_s.pop(target, None)

    def tick(self) -> None:
        """Note what each engine shows; look at those that are suspect, end those that are dead."""
        for engine in self.pool.all():
            if not engine.requests and not (engine.identity and self.lives.pulse(engine).missed):
                self._seen.pop(engine, None)
                continue
            before, self._seen[engine] = self._seen.get(engine, {}), {}
            for target in _targets(engine):
                self._read(target, before, self._seen[engine])
            self._look(engine)
            if engine not in self._ends_s:
                self._judge(engine)
            elif self._ends_s[engine] <= self.lives.clock():
                self._end(engine)

    async def _run(self) -> None:
        last_s, late, failed = self.lives.clock(), False, 0
        while True:
            await asyncio.sleep(TICK_S)
            took_s, last_s = self.lives.clock() - last_s, self.lives.clock()
            late = took_s > _LATE_S and not late
            if late:
                continue
            try:
                self.tick()
            except Exception:
                failed += 1
                if failed.bit_count() == 1:  # it may fail four times a second
                    log.exception("what engines show could not be judged (%d so far)", failed)

    def _read(self, target: Engine, before: Streams, seen: Streams) -> None:
        """Note what the connections to `target` show, and in `seen` where its streams stand."""
        heard_s, given_s, gaps_s, events = self.events_s(target) or 0.0, 0.0, 0.0, 0
        for connection in self.connections(target):
            byte_s, owes_s, count = connection.signs()
            heard_s = max(heard_s, byte_s)
            if owes_s is None or owes_s == NEVER:
                continue
            given_s, seen[connection] = max(given_s, owes_s), (owes_s, count)
            then_s, earlier = before.get(connection, (owes_s, count))
            if count > earlier:
                gaps_s, events = gaps_s + owes_s - then_s, events + count - earlier
        self.lives.pulse(target.server).showed(heard_s)
        self.lives.progress(target).saw(given_s or None, gaps_s / events if events else 0.0)

    def _look(self, engine: Engine) -> None:
        """Begin the look at `engine` that is due, unless one is under way."""
        if engine in self._looks or engine.identity is None:
            return
        due = {self.lives.progress(target).due() for target in engine.targets}
        if self.lives.pulse(engine).is_suspect:
            due.add(Look.COUNTERS)
        if Look.COUNTERS in due:
            self._begin(engine, self._read_counters(engine))
        elif Look.TRIAL in due:
            self._begin(engine, self._try(engine, engine.identity.models[0]))

    def _begin(self, engine: Engine, look: Coroutine[None, None, None]) -> None:
        task = self._looks[engine] = asyncio.create_task(look, name=f"look at {engine.address}")
        task.add_done_callback(lambda _: self._looks.pop(engine))

    async def _read_counters(self, engine: Engine) -> None:
        deadline_s = min(self.client.timeout_s, self.lives.limits.stall_s / 4)
        try:
            page = (await self.client.ask(engine, "/metrics", None, deadline_s)).body
        except ProbeFailed as error:
            if not 400 <= error.status < 500:
                self.lives.pulse(engine).unread += error.silent
                for target in engine.targets:
                    self.lives.progress(target).unanswered()
                return
            page = b""
        self.lives.pulse(engine).showed(self.lives.clock())
        for target in engine.targets:
            self.lives.progress(target).counted(tokens_counted(page, target))

    async def _try(self, engine: Engine, model: str) -> None:
        """Have an engine without counters compute a token; a refusal shows nothing against it."""
        suspects = [t for t in engine.targets if self.lives.progress(t).due() is Look.TRIAL]
        path, body = self.families.of(engine).trial(model)
        works = True
        try:
            await self.client.ask(engine, path, body, self.lives.limits.stall_s)
        except ProbeFailed as error:
            works = 400 <= error.status < 500
        for progress in map(self.lives.progress, suspects):
            progress.worked() if works else progress.unanswered()

    def _judge(self, engine: Engine) -> None:
        pulse, progress = self.lives.pulse(engine), self.lives.progress
        prefills_alone = 0 < engine.prefills == engine.requests
        if pulse.is_gone(prefills_alone=prefills_alone):
            why = f"it has shown no sign of life for {pulse.silent_s:.0f} s"
            self._condemn(engine, "silent", why)
            return
        stalled = [progress(target) for target in engine.targets if progress(target).stalled]
        if not stalled or engine.identity is None:
            return
        quiet_s = max(each.quiet_s for each in stalled)
        why = f"its streams have got nothing for {quiet_s:.0f} s, and it computes nothing"
        if self._replaceable(engine, engine.identity.models):
            self._condemn(engine, "stalled", why)
            return
        for each in stalled:
            each.worked()
        if engine not in self._spared:
            self._spared.add(engine)
            log.warning("engine %s stays, as the last of its model: %s", engine.address, why)

    def _replaceable(self, engine: Engine, models: tuple[str, ...]) -> bool:
        """Whether another server can take its streams, for each of its models."""
        return all(
            any(other.server is not engine for other in self.pool.engines(Role.DECODE, model))
            for model in models
        )

    def _condemn(self, engine: Engine, cause: Cause, why: str) -> None:
        """`engine` is dead: it leaves, and what is in flight on it ends soon."""
        self._ends_s[engine] = self.lives.clock() + _LAST_S
        legs = engine.requests
        if self.pool.leave(engine, cause, why) or legs:
            log.warning("engine %s is dead: %s; legs cut off: %d", engine.address, why, legs)

    def _end(self, engine: Engine) -> None:
        """Break off its legs, and whatever is sent to it before it joins again."""
        for target in _targets(engine):
            self.connections(target).cut(Failure.DEAD, engine.left_why or "it is dead")


def tokens_counted(page: bytes, target: Engine) -> float | None:
    """Tokens that `target` has counted so far, by its metrics; None: it counts none.

    Those of its own data-parallel rank, if the page tells ranks apart.

    They show that its core works; the server itself moves none of them. vLLM counts each step
    (v1/metrics/loggers.py, `counter_generation_tokens`). SGLang's scheduler counts
    `realtime_tokens` each step or log interval (srt/observability/scheduler_metrics_mixin.py), the
    others when a request ends.
    """
    counts = [(_RANK.search(labels), float(count)) for labels, count in _TOKENS.findall(page)]
    if not counts:
        return None
    own = b"%d" % target.event_rank
    if target.rank is not None and any(rank and rank[1] == own for rank, _ in counts):
        counts = [(rank, count) for rank, count in counts if rank and rank[1] == own]
    return sum(count for _, count in counts)


def _targets(engine: Engine) -> Iterator[Engine]:
    """Whatever legs of the server may be on."""
    yield engine
    yield from engine.all_ranks.values()
