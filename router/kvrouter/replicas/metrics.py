"""Metrics of the group and its Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.telemetry.series import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.engines.pool import EnginePool
    from kvrouter.replicas.group import Group


def readings(group: Group | None, pool: EnginePool) -> Iterator[Reading]:
    """All of them; none without a group."""
    if group is None:
        return
    redis = group.redis
    yield Reading(
        "kvrouter:replicas",
        "Other routers of this group that sent a message within the last 5 s.",
        lambda: len(group.peers),
    )
    yield Reading(
        "kvrouter:replica_lag_seconds",
        "Time that the last message of this router took through Redis and back.",
        lambda: group.lag_s,
    )
    yield Reading(
        "kvrouter:replica_silence_seconds",
        "Time since the last state of the router that has been silent longest.",
        group.peers.oldest_state_s,
    )
    yield Reading(
        "kvrouter:replica_messages",
        "Messages to and from other routers, lost and refused ones too, by kind.",
        group.counts.items,
        ["kind"],
        grows=True,
    )
    yield Reading(
        "kvrouter:worker_tokens_elsewhere",
        "Tokens in flight on an engine from other routers of the group.",
        lambda: ((engine.address, engine.remote_tokens) for engine in pool.targets()),
        ["engine"],
    )
    yield Reading(
        "kvrouter:redis_connected",
        "Whether Redis answered the last command.",
        lambda: redis.connected,
    )
    yield Reading(
        "kvrouter:redis",
        "Connections to Redis, and commands that failed or were refused, by kind.",
        redis.counts.items,
        ["kind"],
        grows=True,
    )
