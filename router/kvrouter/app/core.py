"""The parts of a router on which its other parts are built."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvrouter.access.setup import Access, AdminToken
from kvrouter.admission.held import RecomputeBudget
from kvrouter.admission.tenants import Tenants
from kvrouter.admission.waiting import EngineWait, ModelGates, QueueWait
from kvrouter.engines.families import Families
from kvrouter.engines.models import ModelNames
from kvrouter.engines.pool import EnginePool
from kvrouter.http.deadlines import DeadlineTimer
from kvrouter.options.types import by_engine
from kvrouter.prefix.events.tracker import CacheTracker
from kvrouter.prefix.hash_cache import HashCache
from kvrouter.prefix.index import PrefixIndex
from kvrouter.prefix.lower import LowerTiers
from kvrouter.prefix.stores import foreign_store
from kvrouter.prefix.stores.node import NodesView
from kvrouter.prefix.stores.node_index import NodeIndex
from kvrouter.prefix.tokenize import LocalTokenizer, TokenSource
from kvrouter.serving.legs.calls import post
from kvrouter.serving.legs.leg import EngineClient
from kvrouter.serving.request.limits import ServingLimits
from kvrouter.serving.streaming.keep_alive import KeepAlive
from kvrouter.telemetry.metrics import Metrics
from kvrouter_store.client.asyncio_client import AsyncStoreClient

if TYPE_CHECKING:
    from kvrouter.app.settings import RouterSettings
    from kvrouter.prefix.stores.base import StoreView

STORE_DEADLINE_S: Final = 1.25
"""A node that is silent for so long is away. It must be more than nodes wait for their tiers."""
_TICK_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What a router knows and asks. Nothing of it runs yet."""

    settings: RouterSettings
    metrics: Metrics
    access: Access
    admin_token: AdminToken
    pool: EnginePool
    families: Families
    models: ModelNames
    timer: DeadlineTimer  # of the connections to engines
    client: EngineClient
    keep_alive: KeepAlive
    tokens: TokenSource
    hash_cache: HashCache
    index: PrefixIndex
    tracker: CacheTracker | None  # None: no KV events are taken
    nodes: NodesView | None  # of the store; None: there is none, or it is of another project
    store: StoreView | None
    queue_wait: QueueWait
    gates: ModelGates
    engine_wait: EngineWait
    budget: RecomputeBudget
    limits: ServingLimits


def make_core(settings: RouterSettings) -> Core:
    """Make them, for the running loop.

    TokenizerUnavailable: `--tokenizer` cannot be loaded. UsageError: a file of keys has changed
    since the settings were checked.
    """
    metrics, access = Metrics(), Access(settings)
    pool = EnginePool(breaker_limits=settings.breaker_limits)
    for address, role in settings.engines.items():
        pool.add(address, role)
    timer = DeadlineTimer(asyncio.get_running_loop(), _TICK_S)
    client = EngineClient(
        pool=pool,
        timer=timer,
        deadlines=settings.deadlines,
        metrics=metrics,
        worker_keys=access.worker_keys,
        trust=access.trust,
    )
    queue_wait = QueueWait(
        settings.max_concurrent_requests,
        settings.queue_size,
        timeout_s=settings.queue_timeout_s,
        tenants=Tenants(settings.tenant_header, settings.proxy_networks),
        metrics=metrics,
    )
    index, nodes = PrefixIndex(settings.index_blocks), _nodes(settings)
    lower = LowerTiers(settings.index_blocks) if settings.takes_kv_events else None
    foreign = foreign_store(settings.store[0]) if settings.store and nodes is None else None
    return Core(
        settings=settings,
        metrics=metrics,
        access=access,
        admin_token=AdminToken(settings.admin_token.get_secret_value()),
        pool=pool,
        families=Families(),
        models=ModelNames(settings.model, settings.model_retention_s, aliases=settings.aliases),
        timer=timer,
        client=client,
        keep_alive=KeepAlive(settings.sse_keep_alive_interval_s),
        tokens=TokenSource(
            partial(post, client),
            LocalTokenizer(settings.tokenizer) if settings.tokenizer else None,
        ),
        hash_cache=HashCache(),
        index=index,
        tracker=CacheTracker(index, pool.find, pool.domain_of, lower=lower) if lower else None,
        nodes=nodes,
        store=nodes or foreign,
        queue_wait=queue_wait,
        gates=ModelGates(queue_wait, settings.model_limits),
        engine_wait=EngineWait(settings.engine_wait_s, settings.queue_size, metrics),
        budget=RecomputeBudget(settings.recompute_budget_tokens),
        limits=limits_of(settings),
    )


def _nodes(settings: RouterSettings) -> NodesView | None:
    if not settings.has_nodes:
        return None
    token, tls = settings.store_token.get_secret_value(), settings.store_tls
    ports = by_engine(settings.store_events_connect)
    replay_ports = by_engine(settings.store_events_replay)
    nodes = NodesView(
        lambda url: AsyncStoreClient(
            url, name="router", token=token, tls=tls, deadline_s=STORE_DEADLINE_S
        ),
        NodeIndex(settings.index_blocks, ports, replay_ports) if ports else None,
    )
    nodes.follow(settings.store_nodes)
    return nodes


def limits_of(settings: RouterSettings) -> ServingLimits:
    """How requests are served, as far as it may change."""
    return ServingLimits(
        max_choices=settings.max_choices,
        max_attempts=settings.retry_max_attempts,
        landing_timeout_s=settings.landing_timeout_s,
        prefill_threshold=settings.prefill_threshold or 0,
        model_thresholds=settings.model_thresholds,
        max_predicted_ttft_s=settings.max_predicted_ttft_s,
    )
