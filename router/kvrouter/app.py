"""Puts the router together, opens its port and takes it down again. Decides nothing.

The process around it is `kvrouter.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from kvrouter.access.access import Access
from kvrouter.access.ports import Ports, split
from kvrouter.admin import Admin
from kvrouter.budget import RecomputeBudget
from kvrouter.build import entrance, store_client
from kvrouter.cache_use import cache_readings
from kvrouter.canary.canary import make_canary
from kvrouter.chains import Chains
from kvrouter.discovery import make_source
from kvrouter.discovery.base import Reach
from kvrouter.discovery.flags import FlagsSource
from kvrouter.discovery.following import Discovery
from kvrouter.dispatch import Ahead
from kvrouter.ended import Ended
from kvrouter.entrance import Standby
from kvrouter.expected import Expected
from kvrouter.families import FAMILIES
from kvrouter.fanout import Fanout
from kvrouter.fleet import Fleet
from kvrouter.handover import Handover
from kvrouter.http.client import Deadlines
from kvrouter.http.limits import Limits
from kvrouter.http.routes import Routes
from kvrouter.http.server import HttpServer
from kvrouter.http.watch import Watch
from kvrouter.journey import Journey
from kvrouter.kv_events import EventIntake
from kvrouter.kv_ledger import EventLedger
from kvrouter.landing import StoreView
from kvrouter.leg import Legs
from kvrouter.metrics import Metrics, Reading
from kvrouter.models import ModelNames
from kvrouter.outlet import Direct
from kvrouter.page.board import Board
from kvrouter.passthrough import Passthrough
from kvrouter.policies import make_policy
from kvrouter.pool import Pool
from kvrouter.prefill_priority import Priorities
from kvrouter.prefix_index import PrefixIndex
from kvrouter.probe import Prober
from kvrouter.readings import Readings
from kvrouter.redis_link import RedisLink
from kvrouter.release import Releases
from kvrouter.replicas.group import make_group
from kvrouter.replicas.readings import readings as group_readings
from kvrouter.resume import Resumption
from kvrouter.serve import Router
from kvrouter.sharing import Sharing
from kvrouter.status import Status
from kvrouter.survey import Survey
from kvrouter.tokens import LocalTokenizer, TokenSource
from kvrouter.tracing.start import start_traces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.canary.canary import Canary
    from kvrouter.config import RouterSettings
    from kvrouter.engine import Engine
    from kvrouter.http.server import Handler
    from kvrouter.log import RequestLog
    from kvrouter.page.control import ControlSide
    from kvrouter.tracing.exporter import Exporter
    from kvrouter.tracing.trace import Tracing
    from kvstore.log import LogWriter

    Row = tuple[str, str, Handler]

CONNECT_S: Final = 5.0
STORE_WAIT_S: Final = 2.0
"""How long the start waits for the store, which may also come later."""
TRACES_S: Final = 3.0
"""How long the end waits for a collector to take what traces are left."""
_TICK_S: Final = 0.25
_SWEEP_S: Final = 0.1

log = logging.getLogger(__name__)


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
        self.pool = Pool()
        for address, role in settings.engines.items():
            self.pool.add(address, role)
        self._families = {name: family() for name, family in FAMILIES.items()}
        self._policy = make_policy(settings.policy)
        self.index = PrefixIndex(settings.index_blocks)
        self.models = ModelNames(settings.model, settings.model_retention_s)
        self._ledger: EventLedger | None = None
        if settings.takes_kv_events:
            self._ledger = EventLedger(self.index, self.pool.find, lambda: self.pool.domain)
        self._client = store_client(settings)
        self._redis = RedisLink(url) if (url := settings.redis.get_secret_value()) else None
        self._store = StoreView(self._client) if self._client is not None else None
        self.budget = RecomputeBudget(settings.recompute_budget_tokens)
        self.entrance = entrance(settings, self.metrics)
        self.standby = Standby(settings.engine_wait_s, settings.queue_size)
        self._tokenizer = LocalTokenizer(settings.tokenizer) if settings.tokenizer else None
        self._intake: EventIntake | None = None
        self._watch: Watch | None = None
        self._legs: Legs | None = None
        self._releases: Releases | None = None
        self._canary: Canary | None = None
        self._tokens: TokenSource | None = None
        self.survey: Survey | None = None
        self.handover: Handover | None = None
        self.router: Router | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.ports: Ports | None = None
        self.server: HttpServer | None = None
        self._board = Board() if settings.control_port is not None else None
        self.prober = self._make_prober()
        self.fleet = Fleet(self.pool, self.prober)
        self.flags = FlagsSource(settings.engines)
        self.discovery = self._make_discovery()
        self.group = make_group(self, self._redis, self._ledger)
        self._asked = False  # whether every engine has been asked once
        self._sharing = Sharing(self.pool, self._store.difference if self._store else None)

    async def start(self) -> int:
        """Open the port and ask every engine once; returns the port.

        Raises:
            OSError: an address cannot be bound.
        """
        settings = self.settings
        self._watch = Watch(asyncio.get_running_loop(), _TICK_S)
        deadlines = Deadlines(CONNECT_S, settings.request_timeout_s, settings.request_timeout_s)
        self._legs = Legs(
            self.pool,
            self._families,
            self._watch,
            deadlines,
            self.metrics,
            worker_keys=self.access.worker_keys,
            trust=self.access.trust,
        )
        watchers = (self.models, self._policy, self.index, self._legs, self._sharing)
        for watcher in (*watchers, self._ledger, self.standby):
            if watcher is not None:
                self.pool.watch(watcher)
        for told in (self.models.engine_joined, self.standby.engine_joined):
            self.pool.when_models_change(told)
        self.pool.when_removed(self._forget)
        if self._ledger is not None:
            self._intake = EventIntake(settings, self._ledger, self.pool)
        if self._client is not None:
            self._client.start()
            await self._client.wait_connected(STORE_WAIT_S)
        self._tracing, self._exporter = start_traces(settings, self.metrics)
        tokens = self._tokens = TokenSource(self._legs.post, self._tokenizer)
        router = self.router = self._router(self._legs, tokens)
        self._expose(tokens)
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/completions", router.completions),
            ("POST", "/v1/chat/completions", router.chat),
            *self._passthrough(self._legs).routes(),
        ]
        status = self._status()
        routes += status.routes()
        if settings.admin:
            token = settings.admin_token.get_secret_value()
            fleet = self.group.fleet if self.group is not None else self.fleet
            routes += Admin(self.pool, fleet, self.prober, token, self._ledger).routes()
        port = await self._listen(routes, status)
        self._sweeper = asyncio.create_task(self._sweep(), name="sweep")
        self.prober.begin(self.pool.all())
        await self.discovery.start()
        await self.prober.asked()
        self._asked = True
        if self.group is not None:
            self.group.start(port)
        return port

    async def _listen(self, routes: list[tuple[str, str, Handler]], status: Status) -> int:
        """Open the ports; returns the public one."""
        settings = self.settings
        control = None
        if self._board is not None:
            routes, rows = split(routes)
            control = self._control_side(self._board, status, rows)
        gate = self.access.gate(Routes(routes).handle, self.metrics, self._lines)
        self.access.advise(settings.host, plain=not settings.ssl_certfile)
        limits = Limits(body_memory_bytes=settings.max_body_memory)
        self.ports = Ports(HttpServer(gate.handle, limits, gate.at_head), control)
        self.server = self.ports.public
        return await self.ports.listen(settings.host, settings.port, settings)

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
        for remote in (self._canary, self._releases, self._client, self.group, self._redis):
            if remote is not None:
                await remote.close()
        self.metrics.settle()
        for local in (self._legs, self._watch, self._lines):
            if local is not None:
                local.close()
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close, TRACES_S)

    def _make_discovery(self) -> Discovery:
        reach = Reach(self._redis, self.settings.redis_prefix)
        sources = (make_source(text, reach) for text in self.settings.discovery)
        return Discovery(self.fleet, (self.flags, *sources))

    def _make_prober(self) -> Prober:
        settings = self.settings
        return Prober(
            self.pool,
            self._families.__getitem__,
            connector=settings.kv_connector,
            bootstrap_ports=settings.bootstrap_ports,
            rank_counts=settings.rank_counts,
            try_priority=settings.prefill_priority == "auto",
            interval_s=settings.health_interval_s,
            timeout_s=settings.health_timeout_s,
            model=settings.model,
            worker_keys=self.access.worker_keys,
            trust=self.access.trust,
            learn=self._store.learn if self._store is not None else None,
        )

    def _journey(self, legs: Legs, tokens: TokenSource) -> Journey:
        settings, expected = self.settings, Expected()
        self.chains = chains = Chains()
        self.survey = Survey(
            legs=legs,
            tokens=tokens,
            chains=chains,
            index=self.index,
            expected=expected,
            ledger=self._ledger,
            store=self._store,
            needs_hashes=self._policy.needs_hashes,
            prefill_threshold=settings.prefill_threshold,
            tell=self.group.holdings.tell_guess if self.group is not None else None,
        )
        self.handover = Handover(self._store, chains, settings.landing_timeout_s, self.metrics)
        ahead = Ahead(
            legs,
            self.handover,
            settings.sent_ahead_blocks,
            settings.request_timeout_s,
            self.metrics,
        )
        self._releases = Releases(self.pool, legs, self.metrics)
        return Journey(
            pool=self.pool,
            policy=self._policy,
            survey=self.survey,
            legs=legs,
            handover=self.handover,
            ahead=ahead,
            budget=self.budget,
            standby=self.standby,
            releases=self._releases,
            priorities=Priorities(settings.prefill_priority),
            expected=expected,
            metrics=self.metrics,
        )

    def _router(self, legs: Legs, tokens: TokenSource) -> Router:
        settings, journey = self.settings, self._journey(legs, tokens)
        resumption = Resumption(journey, legs, self.metrics) if settings.resume_streams else None
        self._canary = make_canary(
            settings,
            pool=self.pool,
            legs=legs,
            metrics=self.metrics,
            journey=journey,
            resumption=resumption,
            entrance=self.entrance,
            standby=self.standby,
        )
        return Router(
            journey=journey,
            fanout=Fanout(journey, legs, self.metrics, resumption),
            outlet=Direct(legs, self.metrics),
            entrance=self.entrance,
            standby=self.standby,
            metrics=self.metrics,
            ended=Ended(self.metrics, self._lines, self._tracing),
            models=self.models,
            resumption=resumption,
            max_choices=settings.max_choices,
            tells_route=settings.route_headers,
            tracing=self._tracing,
            canary=self._canary,
            board=self._board,
        )

    def _passthrough(self, legs: Legs) -> Passthrough:
        return Passthrough(
            pool=self.pool,
            legs=legs,
            models=self.models,
            entrance=self.entrance,
            standby=self.standby,
            budget=self.budget,
            metrics=self.metrics,
            log=self._lines,
            tells_route=self.settings.route_headers,
            tracing=self._tracing,
        )

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

    def _control_side(self, board: Board, status: Status, rows: list[Row]) -> ControlSide:
        """What is served on the control port: `rows`, and the page."""
        from kvrouter.page.wiring import control_side  # noqa: PLC0415 (heavy, and seldom wanted)

        return control_side(self, board, status, rows, ledger=self._ledger, client=self._client)

    def _expose(self, tokens: TokenSource) -> None:
        """Let a scrape see what other objects count and know."""
        counts: dict[str, Mapping[str, int]] = {"tokenize": tokens.counts}
        if self._store is not None:
            counts["store_view"] = self._store.counts
        if self._ledger is not None:
            counts["kv_event"] = self._ledger.counts
        waiting = {
            "capacity": lambda: self.entrance.waiting,
            "engine": lambda: self.standby.waiting,
        }
        readings = Readings(
            self.pool, self.index, self.budget, self._sharing, self._ledger, waiting=waiting
        )
        tasks = Reading(
            "kvrouter:tasks",
            "Tasks of the event loop: one per request under way, one per engine, and a few.",
            lambda: [((), float(len(asyncio.all_tasks())))],
        )
        draining = Reading(
            "kvrouter:draining",
            "1 while the router lets requests under way end before it stops, else 0.",
            lambda: [((), float(self.draining))],
        )
        incoming = Reading(
            "kvrouter:incoming_body_bytes",
            "Bytes of request bodies of which a part has come; --max-body-memory bounds them.",
            lambda: [((), float(self.server.half_in_bytes if self.server is not None else 0))],
        )
        dropped = Reading(
            "kvrouter:log_lines_dropped",
            "Lines of the log that were dropped because nothing reads stderr fast enough.",
            lambda: [((), float(self._writer.dropped if self._writer is not None else 0))],
            grows=True,
        )
        for reading in (
            *readings.all(),
            *readings.counters(counts),
            *cache_readings({"tokens": tokens, "block_hashes": self.chains}),
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
            if self._ledger is not None:
                self._ledger.tick()

    def _forget(self, engine: Engine) -> None:
        """Nothing of an engine stays that is removed for good."""
        for each in (engine, *engine.known.values()):
            self.index.engine_left(each)
            if self._ledger is not None:
                self._ledger.forget(each)
            if self._intake is not None:
                self._intake.forget(each)
            if self._legs is not None:
                self._legs.forget(each)
