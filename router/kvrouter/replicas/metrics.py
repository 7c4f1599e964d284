"""Metrics of the group and its Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.telemetry.series import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.engines.pool import EnginePool
    from kvrouter.replicas.group import Group
    from kvrouter.telemetry.series import Row


def readings(group: Group | None, pool: EnginePool) -> Iterator[Reading]:
    """All of them; none without a group."""
    if group is None:
        return
    redis = group.redis
    yield Reading(
        "kvrouter:replicas",
        "Other routers of this group that sent a message within the last 5 s.",
        lambda: [((), float(len(group.peers)))],
    )
    yield Reading(
        "kvrouter:replica_lag_seconds",
        "Time that the last message of this router took through Redis and back.",
        lambda: [((), group.lag_s)],
    )
    yield Reading(
        "kvrouter:replica_silence_seconds",
        "Time since the last state of the router that has been silent longest.",
        lambda: [((), group.peers.oldest_state_s())],
    )
    yield Reading(
        "kvrouter:replica_messages",
        "Messages to and from other routers, lost and refused ones too, by kind.",
        lambda: [((kind,), float(count)) for kind, count in group.counts.items()],
        ["kind"],
        grows=True,
    )
    yield Reading(
        "kvrouter:worker_tokens_elsewhere",
        "Tokens in flight on an engine from other routers of the group.",
        lambda: list(_remote_tokens(pool)),
        ["engine"],
    )
    yield Reading(
        "kvrouter:redis_connected",
        "Whether Redis answered the last command.",
        lambda: [((), float(redis.connected))],
    )
    yield Reading(
        "kvrouter:redis",
        "Connections to Redis, and commands that failed or were refused, by kind.",
        lambda: [((kind,), float(count)) for kind, count in redis.counts.items()],
        ["kind"],
        grows=True,
    )


def _remote_tokens(pool: EnginePool) -> Iterator[Row]:
    for engine in pool.targets():
        yield (engine.address,), float(engine.remote_tokens)
