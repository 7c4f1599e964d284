"""What the dashboard shows, row by row.

In expressions, HERE stands for the chosen routers or store nodes, MODEL for these and the chosen
models, FAILED for the codes of failed requests, RATE for a range that fits the chart.
"""

from typing import Final

from deploy.grafana.panels import Chart, Figure

Series = dict[str, str]  # expressions by the legends of their series
TOKENS: Final = {
    "HERE": 'instance=~"$instance"',
    "MODEL": 'instance=~"$instance", model=~"$model"',
    "FAILED": 'code=~"5..|200"',
    "RATE": "$__rate_interval",
}


def by(label: str, metric: str, labels: str = "HERE") -> Series:
    """The rate of a counter for each value of one label."""
    return {f"{{{{{label}}}}}": f"sum by ({label}) (rate({metric}{{{labels}}}[RATE]))"}


def times(metric: str, labels: str = "HERE") -> Series:
    """The quantiles of a histogram that show how most fare, and how the unlucky do."""
    buckets = f"sum by (le) (rate({metric}_bucket{{{labels}}}[RATE]))"
    quantiles = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {name: f"histogram_quantile({q}, {buckets})" for name, q in quantiles.items()}


def up(role: str) -> str:
    """How many engines of a role are up."""
    known = f'sum(max by (engine) (kvrouter:worker_up{{HERE, role=~"{role}|both"}}))'
    return f"{known} or vector(0)"


FAILURES: Final = "(sum(rate(kvrouter:request_errors_total{HERE, FAILED}[RATE])) or vector(0))"
FLEET: Final = (
    Figure("Routers up", "none", 'sum(up{job="kvrouter"})', 2, 1, falls=True),
    Figure("Prefill engines up", "none", up("prefill"), 2, 1, falls=True),
    Figure("Decode engines up", "none", up("decode"), 2, 1, falls=True),
    Figure(
        "Requests that failed",
        "percentunit",
        f"{FAILURES} / (sum(rate(kvrouter:request_success_total{{HERE}}[RATE])) + {FAILURES})",
        *(0.001, 0.01),
    ),
    Figure(
        "Time to first token, p99",
        "s",
        times("kvrouter:time_to_first_token_seconds")["p99"],
        *(5, 10),
    ),
    Figure(
        "Alerts",
        "none",
        'count(ALERTS{alertname=~"Kv.*", alertstate="firing"}) or vector(0)',
        *(1, 3),
    ),
    Chart(
        "Requests by end",
        "reqps",
        by("finished_reason", "kvrouter:request_success_total")
        | by("code", "kvrouter:request_errors_total"),
        "Reasons for which generation ended, and statuses of failed requests; 200: a stream that "
        "broke off, 499: the client left.",
        stacked=True,
    ),
    Chart(
        "Requests in flight",
        "short",
        {
            "running": "sum(kvrouter:num_requests_running{HERE})",
            "waits: {{reason}}": "sum by (reason) (kvrouter:num_requests_waiting_by_reason{HERE})",
        },
        stacked=True,
    ),
    Chart(
        "Pool saturation",
        "percentunit",
        {"{{role}}": "max by (role) (kvrouter:pool_saturation{HERE})"},
        "Tokens in flight over what KV caches hold. Above 1, requests wait in engines.",
        warn=0.8,
        bad=0.9,
    ),
    Chart(
        "Tokens in flight by engine",
        "short",
        {"{{engine}}": "max by (engine) (kvrouter:worker_tokens{HERE})"},
    ),
    Chart(
        "Engines up",
        "none",
        {"{{engine}} {{role}}": "min by (engine, role) (kvrouter:worker_up{HERE})"},
        "0 if one of the routers does not reach the engine.",
        top=1,
    ),
    Chart(
        "Circuit breakers",
        "none",
        {"{{engine}}": "max by (engine) (kvrouter:circuit_state{HERE})"},
        "0 closed, 1 half open, 2 open.",
        top=2,
    ),
    Chart(
        "Failed legs",
        "reqps",
        {
            "{{leg}}: {{reason}}": "sum by (leg, reason) "
            "(rate(kvrouter:upstream_errors_total{HERE}[RATE]))"
        },
        "Another engine may have served the request.",
    ),
    Chart(
        "CPU of routers",
        "percentunit",
        {"{{instance}}": 'rate(process_cpu_seconds_total{job="kvrouter", HERE}[RATE])'},
        "A router has one event loop: one core is all that it can use.",
        warn=0.7,
        bad=0.85,
    ),
    Chart(
        "Memory of routers",
        "bytes",
        {"{{instance}}": 'process_resident_memory_bytes{job="kvrouter", HERE}'},
    ),
)

PARTS: Final = "kvrouter:time_to_first_token_part_seconds"
MODELS: Final = (
    Chart(
        "Time to first token",
        "s",
        times("kvrouter:time_to_first_token_seconds", "MODEL"),
        warn=5,
        bad=10,
    ),
    Chart(
        "Where the time to the first token goes",
        "s",
        {
            "{{part}}": f"sum by (part) (rate({PARTS}_sum{{HERE}}[RATE]))"
            f' / on () group_left sum(rate({PARTS}_count{{HERE, part="plan"}}[RATE]))'
        },
        "Mean of all models; the parts add up.",
        stacked=True,
    ),
    Chart("Time between tokens", "s", times("kvrouter:inter_token_latency_seconds", "MODEL")),
    Chart("Time of a request", "s", times("kvrouter:e2e_request_latency_seconds", "MODEL")),
    Chart(
        "Time in a queue",
        "s",
        times("kvrouter:request_queue_time_seconds", "MODEL"),
        "Of requests that could not begin at once.",
        warn=1,
        bad=5,
    ),
    Chart(
        "Requests by model",
        "reqps",
        by("model", "kvrouter:request_success_total", "MODEL"),
        stacked=True,
    ),
    Chart(
        "Failures by model",
        "reqps",
        {
            "{{model}} {{code}}": "sum by (model, code) "
            "(rate(kvrouter:request_errors_total{MODEL, FAILED}[RATE]))"
        },
    ),
    Chart(
        "Prompt tokens by the place of their KV",
        "short",
        by("source", "kvrouter:prefix_hit_tokens_total", "MODEL"),
        "At the plan: in the decode engine, its lower tiers, the store, or to be computed (none).",
        stacked=True,
    ),
    Chart(
        "Prompt tokens by their fate",
        "short",
        by("fate", "kvrouter:prompt_tokens_by_fate_total", "MODEL"),
        "Found where, or computed for which reason; they add up to the prompts.",
        stacked=True,
    ),
    Chart(
        "Share of prompt tokens computed although it could be avoided",
        "percentunit",
        {
            "{{fate}}": "sum by (fate) (rate(kvrouter:prompt_tokens_by_fate_total{MODEL, "
            'fate!~"engine|lower|store|neighbour|first_use|other_adapter"}[RATE]))'
            " / on () group_left sum(rate(kvrouter:prompt_tokens_by_fate_total{MODEL}[RATE]))"
        },
        "`kvrouter why` says what to do about each.",
        stacked=True,
        top=1,
    ),
    Chart(
        "Tokens generated",
        "short",
        by("model", "kvrouter:generation_tokens_total", "MODEL"),
        stacked=True,
    ),
    Chart(
        "Saturation by model",
        "percentunit",
        {"{{model}}": 'max by (model) (kvrouter:model_saturation{MODEL, model!=""})'},
        warn=0.8,
        bad=0.9,
    ),
    Chart(
        "Requests for an alias",
        "reqps",
        {
            "{{alias}}: {{model}}": "sum by (alias, model) "
            "(rate(kvrouter:alias_requests_total{MODEL}[RATE]))"
        },
        stacked=True,
    ),
    Chart(
        "Cache hits in engines",
        "percentunit",
        {
            f"{{{{instance}}}} {name}": f"sum by (instance) (rate({hits}_hits_total[RATE]))"
            f" / sum by (instance) (rate({hits}_queries_total[RATE]))"
            for name, hits in {
                "own": "vllm:prefix_cache",
                "store": "vllm:external_prefix_cache",
            }.items()
        },
        "Prompt tokens found in the engine's own cache, and loaded from the store.",
        top=1,
    ),
)

TENANTS: Final = (
    Chart("Requests by key", "reqps", by("key", "kvrouter:key_requests_total"), stacked=True),
    Chart("Tokens by key", "short", by("key", "kvrouter:key_tokens_total"), stacked=True),
    Chart(
        "Refused requests by key",
        "reqps",
        {
            "{{key}}: {{reason}}": "sum by (key, reason) "
            "(rate(kvrouter:key_refused_total{HERE}[RATE]))"
        },
    ),
    Chart(
        "Requests of keys in flight",
        "short",
        {"{{key}}": "sum by (key) (kvrouter:key_requests_running{HERE})"},
        stacked=True,
    ),
    Chart(
        "Store memory by tenant",
        "bytes",
        {
            "{{tenant}}": "sum by (tenant) (kvstore:tenant_used_bytes{HERE})",
            "{{tenant}} quota": "sum by (tenant) (kvstore:tenant_quota_bytes{HERE})",
        },
    ),
    Chart(
        "Limits of tenants in the store",
        "reqps",
        by("tenant", "kvstore:tenant_limited_total"),
        "Requests that were refused, or landed without their lease.",
    ),
)

HITS: Final = "sum(rate(kvstore:hits_total{HERE}[RATE]))"
STORE: Final = (
    Chart(
        "Pool",
        "bytes",
        {name: f"sum(kvstore:{name}_bytes{{HERE}})" for name in ("used", "lent", "fenced", "free")},
        "A full pool is normal: the node evicts.",
        stacked=True,
    ),
    Chart(
        "Blocks found",
        "percentunit",
        {
            "memory and disk": f"{HITS} / ({HITS}"
            ' + sum(rate(kvstore:misses_total{HERE, tier="disk"}[RATE])))'
        },
        "Share of the blocks asked for.",
        top=1,
    ),
    Chart(
        "Blocks evicted",
        "short",
        by("reason", "kvstore:evictions_total"),
        "Evictions for capacity that grow together with misses: the pool is too small.",
    ),
    Chart(
        "Bytes in and out",
        "Bps",
        {
            f"{way} {{{{transport}}}}": "sum by (transport) "
            f"(rate(kvstore:bytes_{way}_total{{HERE}}[RATE]))"
            for way in ("in", "out")
        },
    ),
    Chart(
        "Load of the node's thread",
        "percentunit",
        by("operation", "kvstore:operation_seconds_sum"),
        stacked=True,
        warn=0.6,
        bad=0.8,
    ),
    Chart(
        "Time of operations, p99",
        "s",
        {
            "{{operation}}": "histogram_quantile(0.99, sum by (operation, le) "
            "(rate(kvstore:operation_seconds_bucket{HERE}[RATE])))"
        },
    ),
    Chart(
        "Blocks held",
        "short",
        {
            name: f"sum(kvstore:{name}_blocks{{HERE}})"
            for name in ("leased", "pinned", "reserved", "fenced")
        },
    ),
    Chart("Connections", "short", {"{{instance}} {{transport}}": "kvstore:connections{HERE}"}),
    Chart(
        "Writes and clients refused",
        "reqps",
        {
            name: f"sum(rate(kvstore:{name}_total{{HERE}}[RATE]))"
            for name in (
                *("no_space", "client_limited", "corrupt"),
                *("unauthorized", "tls_failures", "rejected_connections", "bad_frames"),
            )
        },
        "Legends are names of metrics.",
    ),
    Chart(
        "Disk in use",
        "bytes",
        {
            "used": "sum(kvstore:disk_used_bytes{HERE})",
            "size": "sum(kvstore:disk_bytes{HERE})",
        },
    ),
    Chart(
        "Disk reads and writes",
        "Bps",
        {
            "read": "sum(rate(kvstore:disk_read_bytes_total{HERE}[RATE]))",
            "written": "sum(rate(kvstore:disk_written_bytes_total{HERE}[RATE]))",
        },
    ),
    Chart("Time from disk to memory", "s", times("kvstore:disk_promotion_seconds")),
    Chart("Blocks that the disk missed", "short", by("reason", "kvstore:disk_skipped_total")),
    Chart("Disk errors", "short", by("kind", "kvstore:disk_errors_total")),
    Chart(
        "Disk bypassed",
        "none",
        {"{{instance}} {{reason}}": "kvstore:disk_bypassed{HERE}"},
        "1 while the node works from memory alone.",
        top=1,
    ),
)

TRANSFERS: Final = (
    Chart(
        "Landings",
        "reqps",
        by("outcome", "kvrouter:landings_total"),
        "Waits for the KV of a prefill leg.",
        stacked=True,
    ),
    Chart("Time from prefill to landing", "s", times("kvrouter:handoff_seconds")),
    Chart("Plans", "reqps", by("why", "kvrouter:plans_total"), stacked=True),
    Chart(
        "Recompute budget in use",
        "percentunit",
        {"{{instance}}": "kvrouter:recompute_tokens{HERE} / kvrouter:recompute_max_tokens{HERE}"},
        "Prompts that decode engines compute because their KV is missing.",
        warn=0.5,
        bad=0.8,
    ),
    Chart(
        "Hits without room in host memory",
        "short",
        {
            "{{instance}}": "sum by (instance) "
            "(rate(vllm:kv_offload_tiering_promotion_allocation_failures_total[RATE]))"
        },
        "Blocks per second that the store has and engines compute: give them cpu_bytes_to_use.",
    ),
    Chart("KV events", "short", by("kind", "kvrouter:kv_event_total")),
    Chart(
        "Engine caches that the router knows",
        "short",
        {"{{state}}: {{reason}}": "count by (state, reason) (kvrouter:kv_index_state{HERE})"},
        stacked=True,
    ),
    Chart(
        "Why an engine was chosen",
        "reqps",
        by("by", "kvrouter:engines_chosen_total"),
        stacked=True,
    ),
    Chart(
        "Streams whose engine broke off", "reqps", by("outcome", "kvrouter:streams_broken_total")
    ),
    Chart(
        "Pairs that share no KV",
        "none",
        {
            "{{prefill}} and {{decode}}": "max by (prefill, decode) "
            "(kvrouter:sharing_refused{HERE})",
            "{{engine}}: {{reason}}": "max by (engine, reason) (kvstore:sharing_refused{HERE})",
        },
        top=1,
    ),
    Chart(
        "Canary",
        "short",
        {"{{outcome}}": "sum by (outcome) (increase(kvrouter:canary_total{HERE}[1h]))"},
        "Answers within an hour that an engine computed again alone. Diverged: wrong KV.",
    ),
    Chart(
        "Other routers",
        "none",
        {"{{instance}}": "kvrouter:replicas{HERE}"},
        "How many routers of its group each router hears.",
    ),
    Chart("Delay through Redis", "s", {"{{instance}}": "kvrouter:replica_lag_seconds{HERE}"}),
)

ROWS: Final = {
    "Fleet": FLEET,
    "Models": MODELS,
    "Tenants": TENANTS,
    "Store": STORE,
    "Transfers": TRANSFERS,
}
