"""Puts the router together, opens its port and takes it down again. Decides nothing.

The process around it is `kvrouter.app.process`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from kvrouter.access.gate import Gate
from kvrouter.access.ports import Ports, split
from kvrouter.access.setup import Access
from kvrouter.admission.recompute_budget import RecomputeBudget
from kvrouter.admission.waiting import EngineWait
from kvrouter.app.parts import queue_wait, store_client
from kvrouter.canary.sample import Canary
from kvrouter.control.admin import Admin
from kvrouter.control.gauges import (
    counters,
    engine_gauges,
    index_gauges,
    index_state,
    request_gauges,
)
from kvrouter.control.page.board import Board
from kvrouter.control.page.model import Load
from kvrouter.control.page.snapshot import Snapshots, Sources
from kvrouter.control.page.tiers import StoreWatch
from kvrouter.control.status import Status
from kvrouter.engines.compatibility import CompatibilityMonitor, digests_differ
from kvrouter.engines.families import Families
from kvrouter.engines.models import ModelNames
from kvrouter.engines.pool import EnginePool
from kvrouter.http.client.pool import Deadlines
from kvrouter.http.deadlines import DeadlineTimer
from kvrouter.http.server.limits import Limits
from kvrouter.http.server.listener import HttpServer
from kvrouter.http.server.routes import Routes, on_exchange, on_path
from kvrouter.membership.detect import EngineDetector
from kvrouter.membership.discovery import make_source
from kvrouter.membership.discovery.base import RedisAccess
from kvrouter.membership.discovery.flags import FlagsSource
from kvrouter.membership.discovery.follow import Discovery
from kvrouter.membership.fleet import Fleet
from kvrouter.membership.probe_client import ProbeClient
from kvrouter.membership.prober import Prober
from kvrouter.openai.endpoints import PASSED_THROUGH
from kvrouter.prefix.events.intake import EventIntake
from kvrouter.prefix.events.tracker import CacheTracker
from kvrouter.prefix.hash_cache import HashCache
from kvrouter.prefix.in_flight import InFlightPrefixes
from kvrouter.prefix.index import PrefixIndex
from kvrouter.prefix.store_view import StoreView
from kvrouter.prefix.tokenize import LocalTokenizer, TokenSource
from kvrouter.redis.client import RedisClient
from kvrouter.replicas.group import Group
from kvrouter.replicas.metrics import readings as group_readings
from kvrouter.routing.policies import make_policy
from kvrouter.routing.prefill_priority import PrefillPriorities
from kvrouter.serving.choices.fanout import Fanout
from kvrouter.serving.completions import Completions
from kvrouter.serving.handler import RequestHandler
from kvrouter.serving.legs.concurrent import ConcurrentLegs
from kvrouter.serving.legs.decode_ahead import DecodeAhead
from kvrouter.serving.legs.engine_client import EngineClient
from kvrouter.serving.legs.inputs import InputsBuilder
from kvrouter.serving.legs.landing import LandingWaiter
from kvrouter.serving.legs.leg import KINDS, Legs
from kvrouter.serving.legs.orchestrator import Orchestrator
from kvrouter.serving.legs.prefill import PrefillPhase
from kvrouter.serving.legs.release import Releases
from kvrouter.serving.passthrough import Passthrough
from kvrouter.serving.settle import Settler
from kvrouter.serving.streaming.resume import Resumption
from kvrouter.serving.streaming.sinks import ClientSink
from kvrouter.telemetry.caches import cache_readings
from kvrouter.telemetry.metrics import Metrics, Reading
from kvrouter.telemetry.tracing.start import start_traces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.app.settings import RouterSettings
    from kvrouter.control.page.server import WebServer
    from kvrouter.engines.engine import Engine
    from kvrouter.http.server.listener import Handler
    from kvrouter.http.server.respond import Row
    from kvrouter.serving.handler import RequestObserver, Service
    from kvrouter.telemetry.request_log import RequestLog
    from kvrouter.telemetry.tracing.otlp import Exporter
    from kvrouter.telemetry.tracing.trace import Tracing
    from kvrouter_store.log import LogWriter

CONNECT_S: Final = 5.0
STORE_WAIT_S: Final = 2.0
"""How long the start waits for the store, which may also come later."""
TRACES_S: Final = 3.0
"""How long the end waits for a collector to take what traces are left."""
_TICK_S: Final = 0.25
_SWEEP_S: Final = 0.1


class App:
    """One router. `start`, then `close`; both on the running loop.

    Args:
        settings: of `kvrouter serve`.
        lines: takes a line per request, or None.
        writer: writes the log, and counts what it drops; None: nothing is dropped.

    Raises:
        TokenizerUnavailable: `--tokenizer` cannot be loaded.
    """

    _tracing: Tracing | None = None
    _exporter: Exporter | None = None
    _snapshots: Snapshots | None = None

    def __init__(
        self,
        settings: RouterSettings,
        lines: RequestLog | None = None,
        writer: LogWriter | None = None,
    ) -> None:
        self.settings = settings
        self._lines, self._writer = lines if settings.access_log else None, writer
        self.metrics = Metrics()
        self.access = Access(settings)
        self.pool = EnginePool()
        for address, role in settings.engines.items():
            self.pool.add(address, role)
        self._families = Families()
        self._policy = make_policy(settings.policy)
        self.index, self.hash_cache = PrefixIndex(settings.index_blocks), HashCache()
        self.models = ModelNames(settings.model, settings.model_retention_s)
        self._tracker: CacheTracker | None = None
        if settings.takes_kv_events:
            self._tracker = CacheTracker(self.index, self.pool.find, lambda: self.pool.domain)
        self._client = store_client(settings)
        self._redis = RedisClient(url) if (url := settings.redis.get_secret_value()) else None
        self._store = StoreView(self._client) if self._client is not None else None
        self.budget = RecomputeBudget(settings.recompute_budget_tokens)
        self.queue_wait = queue_wait(settings, self.metrics)
        self.engine_wait = EngineWait(settings.engine_wait_s, settings.queue_size)
        self._tokenizer = LocalTokenizer(settings.tokenizer) if settings.tokenizer else None
        self._intake: EventIntake | None = None
        self._watch: DeadlineTimer | None = None
        self._legs: EngineClient | None = None
        self._releases: Releases | None = None
        self._canary: Canary | None = None
        self._tokens: TokenSource | None = None
        self.inputs_builder: InputsBuilder | None = None
        self.landing_waiter: LandingWaiter | None = None
        self.completions: Completions | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.ports: Ports | None = None
        self.server: HttpServer | None = None
        self._board = Board() if settings.control_port is not None else None
        self.prober = self._make_prober()
        self.fleet = Fleet(self.pool, self.prober)
        self.flags = FlagsSource(settings.engines)
        self.discovery = self._make_discovery()
        self.group = self._make_group()
        self._asked = False  # whether every engine has been asked once
        self._compatibility = CompatibilityMonitor(
            self.pool, self._store.difference if self._store else digests_differ
        )

    async def start(self) -> int:
        """Open the port and ask every engine once; returns the port.

        Raises:
            OSError: an address cannot be bound.
        """
        settings = self.settings
        self._watch = DeadlineTimer(asyncio.get_running_loop(), _TICK_S)
        deadlines = Deadlines(CONNECT_S, settings.request_timeout_s, settings.request_timeout_s)
        client = self._legs = EngineClient(
            self.pool,
            self._watch,
            deadlines,
            self.metrics,
            worker_keys=self.access.worker_keys,
            trust=self.access.trust,
        )
        self._follow_pool(client)
        if self._tracker is not None:
            self._intake = EventIntake(settings, self._tracker, self.pool)
        if self._client is not None:
            self._client.start()
            await self._client.wait_connected(STORE_WAIT_S)
        self._tracing, self._exporter = start_traces(
            settings, f"{settings.host}:{settings.port}", self.metrics
        )
        tokens = self._tokens = TokenSource(client.post, self._tokenizer)
        self.completions = self._completions(client, tokens)
        self._expose(tokens)
        settler = Settler(self.metrics, self._lines, self._tracing)
        with_legs = self._handler(self.completions, settler, self._board)
        passed = self._handler(self._passthrough(client), settler, None)
        routes: list[tuple[str, str, Handler]] = [
            *(("POST", path, with_legs.serve) for path in KINDS),
            *(("POST", path, passed.serve) for path in PASSED_THROUGH),
        ]
        port = await self._listen(routes)
        self._sweeper = asyncio.create_task(self._sweep(), name="sweep")
        for engine in self.pool.all():
            self.prober.watch(engine)
        await self.discovery.start()
        await self.prober.probed()
        self._asked = True
        if self.group is not None:
            self.group.start(port)
        return port

    async def _listen(self, routes: list[tuple[str, str, Handler]]) -> int:
        """Open the ports; returns the public one."""
        settings, rows = self.settings, self._rows()
        control = None
        if self._snapshots is not None:
            rows, behind = split(rows)
            control = self._control_side(behind, self._snapshots)
        routes += [(method, path, on_exchange(respond)) for method, path, respond in rows]
        gate = Gate(self.access.ring, Routes(routes).handle, self.metrics, self._lines)
        self.access.advise(settings.host, plain=not settings.ssl_certfile)
        limits = Limits(body_memory_bytes=settings.max_body_memory)
        self.ports = Ports(HttpServer(gate.handle, limits, gate.at_head), control)
        self.server = self.ports.public
        port = await self.ports.listen(settings.host, settings.port, settings)
        if self._snapshots is not None:
            self._snapshots.start()
        return port

    def _follow_pool(self, client: EngineClient) -> None:
        """Tell the parts that know engines which of them come and go."""
        pool, models, engine_wait, tracker = self.pool, self.models, self.engine_wait, self._tracker
        for joined in (
            models.engine_joined,
            self._compatibility.engine_joined,
            engine_wait.engine_joined,
        ):
            pool.on_join(joined)
        for left in (models.engine_left, self.index.clear, client.engine_left):
            pool.on_leave(left)
        if tracker is not None:
            pool.on_join(tracker.engine_joined)
            pool.on_leave(tracker.engine_left)
        for changed in (models.engine_joined, engine_wait.engine_joined):
            pool.on_models_change(changed)
        pool.on_remove(self._forget)

    @property
    def draining(self) -> bool:
        """Whether requests that come now are the last."""
        return self.server is not None and self.server.draining

    async def close(self) -> None:
        """Cut off requests under way, then give everything back. Idempotent."""
        if self.ports is not None:
            await self.ports.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await self.discovery.close()
        await self.prober.close()
        if self._intake is not None:
            self._intake.close()
        if self._tokens is not None:
            self._tokens.close()
        remotes = (self._snapshots, self._canary, self._releases, self._client)
        for remote in (*remotes, self.group, self._redis):
            if remote is not None:
                await remote.close()
        self.metrics.settle()
        for local in (self._legs, self._watch, self._lines):
            if local is not None:
                local.close()
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close, TRACES_S)

    def _make_discovery(self) -> Discovery:
        redis = RedisAccess(self._redis, self.settings.redis_prefix)
        sources = (make_source(text, redis) for text in self.settings.discovery)
        return Discovery(self.fleet, (self.flags, *sources))

    def _make_group(self) -> Group | None:
        """What this router shares with others; None without a Redis."""
        if self._redis is None:
            return None
        return Group(
            self._redis,
            self.settings.redis_prefix,
            pool=self.pool,
            fleet=self.fleet,
            index=self.index,
            tracker=self._tracker,
        )

    def _make_prober(self) -> Prober:
        settings = self.settings
        keys, trust = self.access.worker_keys, self.access.trust
        client = ProbeClient(keys, trust, settings.health_timeout_s)
        detector = EngineDetector(
            self._families,
            client.body,
            connector=settings.kv_connector,
            model=settings.model,
            bootstrap_ports=settings.bootstrap_ports,
            rank_counts=settings.rank_counts,
            try_priority=settings.prefill_priority == "auto",
        )
        learn = self._store.learn if self._store is not None else None
        interval_s = settings.health_interval_s
        return Prober(self.pool, client, detector, interval_s=interval_s, learn=learn)

    def _inputs_builder(self, tokens: TokenSource, in_flight: InFlightPrefixes) -> InputsBuilder:
        return InputsBuilder(
            families=self._families,
            tokens=tokens,
            hash_cache=self.hash_cache,
            index=self.index,
            in_flight=in_flight,
            tracker=self._tracker,
            store=self._store,
            needs_hashes=self._policy.needs_hashes,
            prefill_threshold=self.settings.prefill_threshold,
            publish=self.group.holdings.send if self.group is not None else None,
        )

    def _orchestrator(self, client: EngineClient, tokens: TokenSource) -> Orchestrator:
        settings, in_flight = self.settings, InFlightPrefixes()
        self.inputs_builder = self._inputs_builder(tokens, in_flight)
        self.landing_waiter = LandingWaiter(
            self._store, self.hash_cache, settings.landing_timeout_s, self.metrics
        )
        self._releases = Releases(self.pool, self._families, client, self.metrics)
        legs = Legs(
            pool=self.pool,
            families=self._families,
            client=client,
            inputs_builder=self.inputs_builder,
            priorities=PrefillPriorities(settings.prefill_priority),
            metrics=self.metrics,
        )
        prefill_phase = PrefillPhase(
            self._policy, self._families, legs, self.landing_waiter, self.budget
        )
        ahead = None
        if settings.sent_ahead_blocks is not None:
            ahead = DecodeAhead(
                client=client,
                legs=legs,
                prefill_phase=prefill_phase,
                landing_waiter=self.landing_waiter,
                chunk_blocks=settings.sent_ahead_blocks,
                answer_s=settings.request_timeout_s,
                metrics=self.metrics,
            )
        return Orchestrator(
            pool=self.pool,
            policy=self._policy,
            families=self._families,
            inputs_builder=self.inputs_builder,
            legs=legs,
            prefill_phase=prefill_phase,
            ahead=ahead,
            concurrent=self._concurrent(legs, self._releases),
            landing_waiter=self.landing_waiter,
            engine_wait=self.engine_wait,
            releases=self._releases,
            in_flight=in_flight,
            metrics=self.metrics,
        )

    def _concurrent(self, legs: Legs, releases: Releases) -> ConcurrentLegs:
        return ConcurrentLegs(
            pool=self.pool,
            policy=self._policy,
            families=self._families,
            legs=legs,
            releases=releases,
            engine_wait=self.engine_wait,
        )

    def _completions(self, client: EngineClient, tokens: TokenSource) -> Completions:
        settings, orchestrator = self.settings, self._orchestrator(client, tokens)
        resumption = (
            Resumption(orchestrator, client, self.metrics) if settings.resume_streams else None
        )
        if settings.canary_sample_rate:
            self._canary = Canary(
                settings,
                pool=self.pool,
                families=self._families,
                client=client,
                metrics=self.metrics,
                orchestrator=orchestrator,
                resumption=resumption,
                queue_wait=self.queue_wait,
                engine_wait=self.engine_wait,
            )
        return Completions(
            orchestrator,
            ClientSink(client, self.metrics),
            Fanout(orchestrator, client, self.metrics, resumption),
            self.queue_wait,
            settings.max_choices,
            resumption=resumption,
            canary=self._canary,
        )

    def _passthrough(self, client: EngineClient) -> Passthrough:
        return Passthrough(
            pool=self.pool,
            families=self._families,
            client=client,
            engine_wait=self.engine_wait,
            budget=self.budget,
            metrics=self.metrics,
        )

    def _handler(
        self, service: Service, settler: Settler, observer: RequestObserver | None
    ) -> RequestHandler:
        return RequestHandler(
            service,
            queue_wait=self.queue_wait,
            engine_wait=self.engine_wait,
            models=self.models,
            metrics=self.metrics,
            settler=settler,
            tracing=self._tracing,
            observer=observer,
            route_headers=self.settings.route_headers,
        )

    def _rows(self) -> list[Row]:
        """What the router says of itself, and its administration."""
        settings, status = self.settings, self._status()
        rows = status.rows()
        if settings.admin:
            token = settings.admin_token.get_secret_value()
            fleet = self.group.fleet if self.group is not None else self.fleet
            rows += Admin(self.pool, fleet, self.prober, token, self._tracker).rows()
        if self._board is not None:
            self._snapshots = Snapshots(self._sources(self._board, status))
        return rows

    def _status(self) -> Status:
        client = self._client
        return Status(
            self.pool,
            self.metrics,
            asked=lambda: self._asked,
            store_connected=lambda: client is None or client.connected,
            draining=lambda: self.draining,
            admin=self.settings.admin,
            keys=lambda: self.access.asks,
            apart=self.settings.control_port is not None,
        )

    def _control_side(self, rows: list[Row], snapshots: Snapshots) -> WebServer:
        """What serves the control port: `rows`, and the page."""
        from kvrouter.control.page.server import WebServer  # noqa: PLC0415 (heavy, and seldom wanted)
        from kvrouter.control.page.web import control_app, page_rows  # noqa: PLC0415

        page = page_rows(snapshots.document, self.settings.admin_token.get_secret_value())
        return WebServer(control_app(on_path((*rows, *page))))

    def _sources(self, board: Board, status: Status) -> Sources:
        return Sources(
            pool=self.pool,
            metrics=self.metrics,
            board=board,
            condition=status.condition,
            index_state=lambda engine: index_state(self._tracker, engine),
            problem=self.prober.problem,
            load=self._load,
            store=StoreWatch(self._client) if self._client is not None else None,
            policy=self.settings.policy,
        )

    def _load(self) -> Load:
        return Load(
            running=self.metrics.running,
            limit=self.settings.max_concurrent_requests,
            waiting=self.queue_wait.waiting,
            waiting_for_engine=self.engine_wait.waiting,
            queue_size=self.settings.queue_size,
        )

    def _expose(self, tokens: TokenSource) -> None:
        """Let a scrape see what other objects count and know."""
        counts: dict[str, Mapping[str, int]] = {"tokenize": tokens.counts}
        if self._store is not None:
            counts["store_view"] = self._store.counts
        if self._tracker is not None:
            counts["kv_event"] = self._tracker.counts
        waiting = {
            "capacity": lambda: self.queue_wait.waiting,
            "engine": lambda: self.engine_wait.waiting,
        }
        tasks = Reading(
            "kvrouter:tasks",
            "Tasks of the event loop: one per request in flight, one per engine, and a few.",
            lambda: [((), float(len(asyncio.all_tasks())))],
        )
        draining = Reading(
            "kvrouter:draining",
            "1 while the router lets requests in flight end before it stops, else 0.",
            lambda: [((), float(self.draining))],
        )
        incoming = Reading(
            "kvrouter:incoming_body_bytes",
            "Bytes of bodies that have not arrived completely; --max-body-memory bounds them.",
            lambda: [((), float(self.server.half_in_bytes if self.server is not None else 0))],
        )
        dropped = Reading(
            "kvrouter:log_lines_dropped",
            "Lines of the log that were dropped because stderr is not read fast enough.",
            lambda: [((), float(self._writer.dropped if self._writer is not None else 0))],
            grows=True,
        )
        for reading in (
            *counters(counts),
            *request_gauges(waiting, self.budget),
            *engine_gauges(self.pool, self._compatibility),
            *index_gauges(self.pool, self.index, self._tracker),
            *cache_readings({"tokens": tokens, "block_hashes": self.hash_cache}),
            *self.discovery.readings(),
            *group_readings(self.group, self.pool),
            tasks,
            draining,
            incoming,
            dropped,
        ):
            self.metrics.add(reading)

    async def _sweep(self) -> None:
        """Take what gone engines held out of the index, a little at a time; see to late events."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.index.sweep()
            if self._tracker is not None:
                self._tracker.tick()

    def _forget(self, engine: Engine) -> None:
        """Nothing of an engine stays that is removed for good."""
        for each in (engine, *engine.all_ranks.values()):
            self.index.clear(each)
            if self._tracker is not None:
                self._tracker.forget(each)
            if self._intake is not None:
                self._intake.forget(each)
            if self._legs is not None:
                self._legs.forget(each)
