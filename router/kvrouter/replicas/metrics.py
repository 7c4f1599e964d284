"""Metrics of what routers share. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.telemetry.metrics import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.engines.pool import EnginePool
    from kvrouter.replicas.group import Group
    from kvrouter.telemetry.metrics import Row


def readings(group: Group | None, pool: EnginePool) -> Iterator[Reading]:
    """All of them, none where there is no group; the series of an engine go with it."""
    if group is None:
        return
    redis = group.redis
    yield Reading(
        "kvrouter:replicas",
        "Other routers of this group that were heard within the last 5 s.",
        lambda: [((), float(len(group.peers)))],
    )
    yield Reading(
        "kvrouter:replica_lag_seconds",
        "From a router's telling something to its hearing that itself over Redis, the last time.",
        lambda: [((), group.lag_s)],
    )
    yield Reading(
        "kvrouter:replica_silence_seconds",
        "Since the state of that other router which has been silent longest.",
        lambda: [((), group.peers.oldest_state_s())],
    )
    yield Reading(
        "kvrouter:replica_messages",
        "What was told to other routers and taken from them, lost and refused, by kind.",
        lambda: [((kind,), float(count)) for kind, count in group.counts.items()],
        ["kind"],
        grows=True,
    )
    yield Reading(
        "kvrouter:worker_tokens_elsewhere",
        "Tokens that other routers of the group have under way on an engine.",
        lambda: list(_elsewhere(pool)),
        ["engine"],
    )
    yield Reading(
        "kvrouter:redis_connected",
        "Whether Redis answered what it was asked last.",
        lambda: [((), float(redis.connected))],
    )
    yield Reading(
        "kvrouter:redis",
        "Connections to Redis that were made, operations that failed or were refused.",
        lambda: [((kind,), float(count)) for kind, count in redis.counts.items()],
        ["kind"],
        grows=True,
    )


def _elsewhere(pool: EnginePool) -> Iterator[Row]:
    for engine in pool.targets():
        yield (engine.address,), float(engine.remote_tokens)
