"""Which engines and routers there are: probes, service discovery, the group of routers."""

from __future__ import annotations

import logging
from collections import ChainMap
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvrouter.engines.compatibility import CompatibilityMonitor, digests_differ
from kvrouter.engines.life import Lives
from kvrouter.membership.detect import EngineDetector
from kvrouter.membership.discovery import make_source
from kvrouter.membership.discovery.base import SourceContext
from kvrouter.membership.discovery.follow import Discovery, FlagsSource
from kvrouter.membership.fleet import Fleet
from kvrouter.membership.life_watch import LifeWatch
from kvrouter.membership.probe_client import ProbeClient
from kvrouter.membership.prober import Prober
from kvrouter.options.types import by_engine
from kvrouter.prefix.events.intake import EventIntake
from kvrouter.redis.client import RedisClient
from kvrouter.replicas.group import Group

if TYPE_CHECKING:
    from kvrouter.app.core import Core
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EngineChange
    from kvrouter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """What follows the engines, and the other routers."""

    prober: Prober
    life: LifeWatch
    fleet: Fleet
    flags: FlagsSource
    discovery: Discovery
    compatibility: CompatibilityMonitor
    intake: EventIntake | None  # None: no KV events are taken
    redis: RedisClient | None
    group: Group | None  # None: there is no Redis


def make_members(core: Core) -> Members:
    """Make them, for the running loop. OSError: `--kv-events-bind` cannot be bound."""
    settings, pool, nodes = core.settings, core.pool, core.nodes
    url, prefix = settings.redis.get_secret_value(), settings.redis_prefix
    redis = RedisClient(url) if url else None
    context = SourceContext(redis, prefix, ChainMap(settings.bootstrap_ports), pool.nodes)
    sources = [make_source(text, context) for text in settings.discovery]
    prober = _make_prober(core, context)
    life = _make_life_watch(core, prober)
    fleet, flags = Fleet(pool, prober), FlagsSource(settings.members)
    difference = nodes.manifests.difference if nodes is not None else digests_differ
    compatibility = CompatibilityMonitor(pool, difference)
    _follow_pool(core, compatibility, life)
    group = Group(redis, prefix, pool, fleet, core.index, core.tracker) if redis else None
    intake: EventIntake | None = None
    if core.tracker is not None:
        ports = by_engine(settings.kv_events_connect)
        replay_ports = by_engine(settings.kv_events_replay)
        intake = EventIntake(core.tracker, ports, replay_ports, settings.kv_events_bind)
        pool.on_join(intake.listen)
    pool.on_remove(partial(_forget, core, intake, life))
    return Members(
        prober=prober,
        life=life,
        fleet=fleet,
        flags=flags,
        discovery=Discovery(fleet, (flags, *sources), follow_nodes=partial(_follow_nodes, core)),
        compatibility=compatibility,
        intake=intake,
        redis=redis,
        group=group,
    )


def _make_prober(core: Core, context: SourceContext) -> Prober:
    settings, store = core.settings, core.store
    client = ProbeClient(core.access.worker_keys, core.access.trust, settings.health_timeout_s)
    detector = EngineDetector(
        core.families,
        client.body,
        connector=settings.kv_connector,
        model=settings.model,
        bootstrap_ports=context.bootstrap_ports,
        rank_counts=settings.rank_counts,
        try_priority=settings.prefill_priority == "auto",
        asks_events=settings.asks_events,
    )
    return Prober(
        core.pool,
        client,
        detector,
        interval_s=settings.health_interval_s,
        lives=Lives(core.pool.clock, settings.life_limits),
        joins=store.joins if store is not None else None,
    )


def _make_life_watch(core: Core, prober: Prober) -> LifeWatch:
    tracker = core.tracker
    return LifeWatch(
        pool=core.pool,
        lives=prober.lives,
        client=prober.client,
        families=core.families,
        connections=core.client.connections,
        events_s=tracker.heard_s if tracker is not None else lambda _: None,
    )


def _follow_pool(core: Core, compatibility: CompatibilityMonitor, life: LifeWatch) -> None:
    """Have the parts that know engines called when those come and go."""
    pool, models, engine_wait, tracker = core.pool, core.models, core.engine_wait, core.tracker
    for knows in (life, core.client, models, compatibility, engine_wait):
        pool.on_join(knows.engine_joined)
    for left in (models.engine_left, core.index.clear, core.client.engine_left):
        pool.on_leave(left)
    if tracker is not None:
        pool.on_join(tracker.engine_joined)
        pool.on_leave(tracker.engine_left)
    for changed in (models.engine_joined, engine_wait.engine_joined):
        pool.on_models_change(changed)
    for served in (pool.on_join, pool.on_models_change):
        served(partial(_count_models, core.metrics))
    pool.on_change(partial(_count_left, core.metrics))


def _follow_nodes(core: Core, urls: list[str]) -> None:
    """Use these nodes of the store; a router without a store gets none before its next start."""
    if core.nodes is None and urls:
        text = "store nodes are not used until the router starts with --store or --store-discovery"
        log.warning("%s: %s", ", ".join(urls), text)
    elif core.nodes is not None and (urls or core.settings.store_discovery):
        core.nodes.follow(urls)


def _count_models(metrics: Metrics, engine: Engine) -> None:
    """Have series of its models before the first request: rates need their zero."""
    for name in engine.identity.models if engine.identity is not None else ():
        metrics.of(name)


def _count_left(metrics: Metrics, change: EngineChange, engine: Engine) -> None:
    if change == "left":
        metrics.engines_left[engine.left_for] += 1


def _forget(core: Core, intake: EventIntake | None, life: LifeWatch, engine: Engine) -> None:
    """Drop everything that is known of an engine that is removed for good."""
    for each in (engine, *engine.all_ranks.values()):
        life.forget(each)
        core.index.clear(each)
        if core.tracker is not None:
            core.tracker.forget(each)
        if intake is not None:
            intake.forget(each)
        core.client.forget(each)
