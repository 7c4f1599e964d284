"""What answers the requests that engines serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrouter.canary.replay import Canary
from kvrouter.fates.history import History
from kvrouter.prefix.in_flight import InFlightPrefixes
from kvrouter.prefix.learnt import LearntPrefixes
from kvrouter.routing.plan import PrefillPriorities
from kvrouter.routing.planner.queue import PrefillQueue
from kvrouter.routing.policies import make_policy
from kvrouter.routing.policies.planner import Planner
from kvrouter.serving.choices.fanout import Fanout
from kvrouter.serving.handler import Completions
from kvrouter.serving.legs.early import ConcurrentLegs, DecodeAhead
from kvrouter.serving.legs.inputs import InputsBuilder
from kvrouter.serving.legs.leg import Legs
from kvrouter.serving.legs.orchestrator import Orchestrator
from kvrouter.serving.legs.planning import PrefillQueueWait
from kvrouter.serving.legs.prefill import LandingWaiter, PrefillPhase
from kvrouter.serving.legs.release import Releases
from kvrouter.serving.passthrough import Passthrough
from kvrouter.serving.recording import Recorder
from kvrouter.serving.rendered import RenderedLegs
from kvrouter.serving.streaming.relay import ClientSink
from kvrouter.serving.streaming.resume import Resumption
from kvrouter.telemetry.record_file import RecordFile

if TYPE_CHECKING:
    from kvrouter.app.core import Core
    from kvrouter.replicas.group import Group
    from kvrouter.routing.policies.base import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services, and those of their parts that others read or must close."""

    completions: Completions
    passthrough: Passthrough
    inputs_builder: InputsBuilder
    queue: PrefillQueueWait | None  # where prompts wait for prefill engines
    releases: Releases
    canary: Canary | None
    recorder: Recorder


def make_services(core: Core, group: Group | None) -> Services:
    """Make them. OSError: `--record` cannot be opened."""
    settings, pool, metrics = core.settings, core.pool, core.metrics
    policy = make_policy(settings.policy)
    in_flight = InFlightPrefixes(lambda: core.queue_wait.limit)
    queue = _prefill_queue(core, policy, group)
    inputs_builder = _inputs_builder(core, policy, in_flight, group)
    landing_waiter = LandingWaiter(
        store=core.store,
        hash_cache=core.hash_cache,
        limits=core.limits,
        metrics=metrics,
    )
    releases = Releases(pool=pool, families=core.families, client=core.client, metrics=metrics)
    orchestrator = _orchestrator(
        core, policy, queue, in_flight, inputs_builder, landing_waiter, releases
    )
    resumption = _resumption(core, orchestrator) if settings.resume_streams else None
    sampled = settings.canary_sample_rate > 0
    canary = _canary(core, orchestrator, resumption) if sampled else None
    return Services(
        completions=_completions(core, orchestrator, resumption, canary),
        passthrough=Passthrough(
            pool=pool,
            families=core.families,
            client=core.client,
            engine_wait=core.engine_wait,
            budget=core.budget,
            metrics=metrics,
            policy=policy,
            inputs_builder=inputs_builder,
            rendered=RenderedLegs(
                pool=pool,
                families=core.families,
                tokens=core.tokens,
                orchestrator=orchestrator,
                sink=ClientSink(core.client, metrics),
            ),
            limits=core.limits,
        ),
        inputs_builder=inputs_builder,
        queue=queue,
        releases=releases,
        canary=canary,
        recorder=Recorder(
            settings.session_header,
            core.nodes.kv_bytes if core.nodes is not None else None,
            RecordFile(settings.record, settings.record_max_bytes) if settings.record else None,
        ),
    )


def _prefill_queue(core: Core, policy: Policy, group: Group | None) -> PrefillQueueWait | None:
    if not isinstance(policy, Planner):
        return None
    settings = core.settings
    fixed = settings.prefill_threshold is not None  # then nothing else decides
    return PrefillQueueWait(
        queue=PrefillQueue(
            core.pool.engines,
            policy,
            stall_weight=None if fixed else settings.stall_weight,
            clock=core.pool.clock,
            is_home=group.is_home if group is not None else None,
        ),
        pool=core.pool,
        tenants=core.queue_wait.tenants,
        deadlines=lambda: core.client.deadlines,
        limits=core.limits,
        metrics=core.metrics,
    )


def _inputs_builder(
    core: Core, policy: Policy, in_flight: InFlightPrefixes, group: Group | None
) -> InputsBuilder:
    settings = core.settings
    return InputsBuilder(
        domain=core.pool.domain,
        families=core.families,
        tokens=core.tokens,
        hash_cache=core.hash_cache,
        index=core.index,
        in_flight=in_flight,
        tracker=core.tracker,
        store=core.store,
        needs_hashes=policy.needs_hashes,
        learnt=LearntPrefixes(
            hash_cache=core.hash_cache,
            index=core.index,
            in_flight=in_flight,
            session_key=settings.session_header,
        ),
        history=History(core.hash_cache),
        limits=core.limits,
        publish=group.holdings.send if group is not None else None,
    )


def _completions(
    core: Core, orchestrator: Orchestrator, resumption: Resumption | None, canary: Canary | None
) -> Completions:
    return Completions(
        orchestrator=orchestrator,
        sink=ClientSink(core.client, core.metrics),
        fanout=Fanout(
            pool=core.pool,
            families=core.families,
            orchestrator=orchestrator,
            client=core.client,
            metrics=core.metrics,
            resumption=resumption,
        ),
        queue_wait=core.queue_wait,
        limits=core.limits,
        resumption=resumption,
        canary=canary,
    )


def _resumption(core: Core, orchestrator: Orchestrator) -> Resumption:
    return Resumption(
        pool=core.pool,
        families=core.families,
        orchestrator=orchestrator,
        client=core.client,
        metrics=core.metrics,
    )


def _orchestrator(  # noqa: PLR0917
    core: Core,
    policy: Policy,
    queue: PrefillQueueWait | None,
    in_flight: InFlightPrefixes,
    inputs_builder: InputsBuilder,
    landing_waiter: LandingWaiter,
    releases: Releases,
) -> Orchestrator:
    legs = _legs(core, queue, inputs_builder)
    prefill_phase = PrefillPhase(
        policy=policy,
        families=core.families,
        legs=legs,
        landing_waiter=landing_waiter,
        budget=core.budget,
        limits=core.limits,
    )
    return Orchestrator(
        pool=core.pool,
        policy=policy,
        queue=queue,
        families=core.families,
        inputs_builder=inputs_builder,
        legs=legs,
        prefill_phase=prefill_phase,
        ahead=_ahead(core, legs, prefill_phase, landing_waiter),
        concurrent=ConcurrentLegs(
            pool=core.pool,
            policy=policy,
            families=core.families,
            legs=legs,
            releases=releases,
            engine_wait=core.engine_wait,
            limits=core.limits,
        ),
        landing_waiter=landing_waiter,
        engine_wait=core.engine_wait,
        releases=releases,
        in_flight=in_flight,
        limits=core.limits,
        metrics=core.metrics,
    )


def _legs(core: Core, queue: PrefillQueueWait | None, inputs_builder: InputsBuilder) -> Legs:
    return Legs(
        pool=core.pool,
        families=core.families,
        client=core.client,
        inputs_builder=inputs_builder,
        priorities=PrefillPriorities(core.settings.prefill_priority),
        queue=queue.queue if queue is not None else None,
        metrics=core.metrics,
    )


def _ahead(
    core: Core, legs: Legs, prefill_phase: PrefillPhase, landing_waiter: LandingWaiter
) -> DecodeAhead | None:
    chunk_blocks = core.settings.sent_ahead_blocks
    if chunk_blocks is None:
        return None
    return DecodeAhead(
        client=core.client,
        legs=legs,
        prefill_phase=prefill_phase,
        landing_waiter=landing_waiter,
        limits=core.limits,
        chunk_blocks=chunk_blocks,
        metrics=core.metrics,
    )


def _canary(core: Core, orchestrator: Orchestrator, resumption: Resumption | None) -> Canary:
    return Canary(
        core.settings,
        pool=core.pool,
        families=core.families,
        client=core.client,
        metrics=core.metrics,
        orchestrator=orchestrator,
        resumption=resumption,
        waiting=lambda: core.queue_wait.waiting + core.gates.waiting + core.engine_wait.waiting,
    )
