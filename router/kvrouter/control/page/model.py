"""The document of /status.json, for the page, for `kvrouter status` and for scripts.

Prompts and answers are never in it. Counts are of the last minute where nothing else is said, times
are seconds; what is unknown is null. Members are added, not renamed.
"""

from __future__ import annotations

from typing import Final

import msgspec

SCHEMA: Final = 1
"""Grows when a member is renamed or goes."""


class RouterCard(msgspec.Struct):
    """The router itself.

    Attributes:
        state: "starting", "ok", "degraded", "unavailable" (no decode engine) or "draining", as
            /health has it.
        lacking: what is wrong, in sentences.
        policy: how engines are chosen.
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
        running: under way.
        limit: as many may be under way at a time.
        waiting: for their turn.
        waiting_for_engine: for a decode engine to come.
        queue_size: as many may wait.
    """

    running: int
    limit: int
    waiting: int
    waiting_for_engine: int
    queue_size: int


class Minute(msgspec.Struct):
    """The last minute, or as much of it as there was.

    Attributes:
        span_s: how long that is.
        ok: requests answered well; failed: the others.
        prompt_tokens: of plans; engine_tokens and store_tokens of them were held by the decode
            engine itself, and by the store.
        output_tokens: tokens, or events of streams, that clients got.
        ttft_p50_s, ttft_p95_s: from arrival to the first byte; null without requests.
    """

    span_s: float
    ok: int
    failed: int
    prompt_tokens: int
    engine_tokens: int
    store_tokens: int
    output_tokens: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None


class RankCard(msgspec.Struct):
    """One data-parallel rank."""

    id: str
    breaker: str | None
    requests: int
    tokens: int
    index: str | None


class EngineCard(msgspec.Struct):
    """One engine.

    Attributes:
        id: HOST:PORT.
        role: "prefill", "decode" or "both".
        state: "up", "away" or "draining".
        breaker: "closed", "open" or "half_open"; null while it is away.
        requests: legs under way on it from this router; tokens: of these and of planned ones.
        index: how exactly its cache is known, as `kvrouter:kv_index_state` says.
        family: the dialect that it speaks.
        version: as it tells.
        block_tokens: tokens of one KV block.
        problem: what was wrong when it was asked last, in a sentence.
    """

    id: str
    role: str
    state: str
    breaker: str | None
    requests: int
    tokens: int
    index: str | None
    family: str | None
    version: str | None
    block_tokens: int | None
    models: list[str]
    ranks: list[RankCard]
    problem: str | None


class FlowCard(msgspec.Struct):
    """Requests whose answers began, by where their prompts were computed and decoded.

    Attributes:
        prefill: null where there was no prefill leg.
        tokens: of their prompts.
    """

    prefill: str | None
    decode: str
    requests: int
    tokens: int


class History(msgspec.Struct):
    """What happened, in buckets of `bucket_s`, the oldest first.

    Attributes:
        end_s: Unix time of the end of the last bucket.
        series: of equal length; a bucket in which nothing was measured has null.
    """

    bucket_s: float
    end_s: float
    series: dict[str, list[float | None]]


class RequestCard(msgspec.Struct):
    """One request under way.

    Attributes:
        key: its number, for ids are the clients' own and need not differ.
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
    """The oldest requests under way, and how many there are in all."""

    total: int
    shown: list[RequestCard]


class TierCard(msgspec.Struct):
    """One tier of the store: "memory" or "disk".

    Attributes:
        hits, misses, evictions: blocks in the last minute.
        note: why it is not used, where it is not.
    """

    name: str
    size_bytes: int
    used_bytes: int
    blocks: int
    hits: int
    misses: int
    evictions: int
    note: str | None = None


class StoreCard(msgspec.Struct):
    """The store, as it told `age_s` ago; without tiers while it has told nothing.

    Attributes:
        connections: by transport.
        in_bytes, out_bytes: of blocks, in the last minute.
    """

    url: str
    connected: bool
    age_s: float | None
    problem: str | None
    tiers: list[TierCard]
    leases: int
    connections: dict[str, int]
    in_bytes: int
    out_bytes: int


class Snapshot(msgspec.Struct):
    """All of it. `time_s` is Unix time."""

    schema: int
    time_s: float
    router: RouterCard
    load: Load
    minute: Minute
    engines: list[EngineCard]
    flows: list[FlowCard]
    history: History
    requests: RequestList
    store: StoreCard | None
