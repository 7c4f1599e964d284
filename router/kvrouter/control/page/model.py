"""The document of /status.json, for the page and for scripts.

It contains no prompts and no answers. Times are seconds, and unknown values are null. Members are
added, never renamed. Histories are the matter of Prometheus.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

SCHEMA: Final = 2  # grows when a member changes its meaning or is removed


class RouterCard(msgspec.Struct):
    """The router itself.

    Attributes:
        state: "starting", "ok", "degraded" (something is lacking, or an engine is down),
            "unavailable" (no decode engine) or "draining", as in /health.
        lacking: sentences about what is wrong.
        policy: that chooses engines.
        started_s: Unix time.
    """

    version: str
    state: str
    lacking: list[str]
    models: list[str]
    policy: str
    started_s: float
    uptime_s: float


class Load(msgspec.Struct):
    """Requests at this moment.

    Attributes:
        running: in flight.
        limit: most requests in flight.
        waiting: for their turn.
        waiting_for_engine: for a decode engine, or for a prefill engine to be free.
        queue_size: most requests that may wait.
    """

    running: int
    limit: int
    waiting: int
    waiting_for_engine: int
    queue_size: int


class Minute(msgspec.Struct):
    """The last minute, or the time since the start of the router.

    Attributes:
        span_s: length of that time.
        ok, failed: successful and failed requests.
        prompt_tokens: of plans; the decode engine held engine_tokens of them in any of its tiers,
            and the store store_tokens.
        output_tokens: tokens, or events of streams, that clients got.
        ttft_mean_s: from arrival to the first byte; null without requests.
    """

    span_s: float
    ok: int
    failed: int
    prompt_tokens: int
    engine_tokens: int
    store_tokens: int
    output_tokens: int
    ttft_mean_s: float | None


class EventCard(msgspec.Struct):
    """Something that happened to an engine or to the router.

    Attributes:
        key: its number.
        at_s: Unix time.
        kind: "joined", "left", "draining", "removed", "breaker open", "breaker closed", "reload"
            or "reload refused".
        engine: HOST:PORT, or HOST:PORT@RANK; null: the router.
        label: of the engine.
        text: why, or what.
    """

    key: int
    at_s: float
    kind: str
    engine: str | None
    label: str | None
    text: str | None


class FlowCard(msgspec.Struct):
    """Requests that ended in the last minute after their answers began, by their engines.

    Attributes:
        prefill: null without a prefill leg.
        tokens: of their prompts.
    """

    prefill: str | None
    decode: str
    requests: int
    tokens: int


class RequestCard(msgspec.Struct):
    """One request in flight.

    Attributes:
        key: its number; ids come from clients and may repeat.
        phase: "queue", "plan", "prefill", "landing", "decode" (no byte yet) or "stream".
        tokens: events that its client got so far.
    """

    key: int
    id: str
    model: str
    phase: str
    prefill: str | None
    decode: str | None
    age_s: float
    prompt_tokens: int | None
    tokens: int


class RequestList(msgspec.Struct):
    """The oldest requests in flight, and the number of all.

    `waiting_s`: how long the one has waited that waits longest for its turn; null: none waits.
    """

    total: int
    waiting_s: float | None
    shown: list[RequestCard]


class TierCard(msgspec.Struct):
    """One tier of the store: "memory", "disk" or "remote", which is all stores below the node.

    Attributes:
        size_bytes: 0 where the node does not know it, nor what is used, nor blocks: of "remote".
        note: why it is not used; null if it is used.
    """

    name: str
    size_bytes: int
    used_bytes: int
    blocks: int
    note: str | None


class StoreCard(msgspec.Struct):
    """A node of the store `age_s` ago; without tiers before its first answer.

    Attributes:
        connections: by transport.
    """

    url: str
    connected: bool
    age_s: float | None
    problem: str | None
    tiers: list[TierCard]
    leases: int
    connections: dict[str, int]


class Snapshot(msgspec.Struct):
    """The document.

    Attributes:
        time_s: Unix time.
        engines: as /workers lists them, and of each: `label`, what its operator calls it; `down`,
            whether it should take legs and cannot; `busy`, the share of the last minute in which it
            had legs of this router, 0 to 1; `family`, `version` and `block_tokens` of a KV block.
            `models` are those that it served before, while it is away.
        fates: of the last minute's prompt tokens, each with `fate`, `words`, `tokens` and `kind`:
            "reused", "needed" or "lost" (computed although it could be avoided).
        stores: the store's nodes.
        store_sizes: share of the last day's prompt tokens that a store of so many bytes would find.
    """

    schema: int
    time_s: float
    router: RouterCard
    load: Load
    minute: Minute
    engines: list[dict[str, Any]]
    events: list[EventCard]
    flows: list[FlowCard]
    requests: RequestList
    stores: list[StoreCard]
    store_sizes: dict[int, float]
    fates: list[dict[str, Any]] = []
