"""Prints the dashboard; `make monitoring` writes it to `dashboards/kvrouter.json`.

What it shows stands here, row by row; how panels look, in `panels.py`.
"""

import json
from itertools import count
from typing import Final

from deploy.grafana.panels import SOURCE, Chart, Figure, Query
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    VariableOption,
    VariableRefresh,
)

HERE: Final = 'instance=~"$instance"'
MODEL: Final = f'{HERE}, model=~"$model"'
FAILED: Final = 'code=~"5..|200"'
UP: Final = "max by (engine) (kvrouter:worker_up"
Row = tuple[str, tuple[Chart | Figure, ...]]


def rate(metric: str, labels: str = HERE, by: str = "") -> str:
    """Growth per second of a counter, summed `by` labels."""
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(q: float, metric: str, labels: str = HERE, by: str = "le") -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', labels, by)})"


def times(metric: str, labels: str = HERE) -> tuple[Query, ...]:
    """The quantiles of a histogram that show how most and how the unlucky fare."""
    return tuple(Query(quantile(q, metric, labels), f"p{q * 100:.0f}") for q in (0.5, 0.95, 0.99))


def by(metric: str, label: str, labels: str = HERE) -> tuple[Query, ...]:
    """The rate of a counter for each value of one label."""
    return (Query(rate(metric, labels, label), f"{{{{{label}}}}}"),)


def gauge(metric: str, *labels: str, where: str = HERE) -> tuple[Query, ...]:
    """The series of a gauge as they are, named by `labels`."""
    return (Query(f"{metric}{{{where}}}", " ".join(f"{{{{{label}}}}}" for label in labels)),)


FLEET: Final[Row] = (
    "Fleet",
    (
        Figure("Routers up", "none", Query('sum(up{job="kvrouter"})', ""), 2, 1, falls=True),
        Figure(
            "Prefill engines up",
            "none",
            Query(f'sum({UP}{{{HERE}, role=~"prefill|both"}}))', ""),
            *(2, 1),
            falls=True,
        ),
        Figure(
            "Decode engines up",
            "none",
            Query(f'sum({UP}{{{HERE}, role=~"decode|both"}}))', ""),
            *(2, 1),
            falls=True,
        ),
        Figure(
            "Requests that failed",
            "percentunit",
            Query(
                f"({rate('kvrouter:request_errors_total', f'{HERE}, {FAILED}')} or vector(0))"
                f" / ({rate('kvrouter:request_success_total')}"
                f" + ({rate('kvrouter:request_errors_total', f'{HERE}, {FAILED}')} or vector(0)))",
                "",
            ),
            *(0.001, 0.01),
        ),
        Figure(
            "Time to first token, p99",
            "s",
            Query(quantile(0.99, "kvrouter:time_to_first_token_seconds"), ""),
            *(5, 10),
        ),
        Figure(
            "Alerts",
            "none",
            Query('count(ALERTS{alertname=~"Kv.*", alertstate="firing"}) or vector(0)', ""),
            *(1, 3),
        ),
        Chart(
            "Requests by end",
            "reqps",
            (
                *by("kvrouter:request_success_total", "finished_reason"),
                *by("kvrouter:request_errors_total", "code"),
            ),
            "Reasons for which generation ended, and statuses of failed requests; 200: a stream "
            "that broke off, 499: the client left.",
            stacked=True,
        ),
        Chart(
            "Requests in flight",
            "short",
            (
                Query(f"sum(kvrouter:num_requests_running{{{HERE}}})", "running"),
                Query(
                    f"sum by (reason) (kvrouter:num_requests_waiting_by_reason{{{HERE}}})",
                    "waits: {{reason}}",
                ),
            ),
            stacked=True,
        ),
        Chart(
            "Pool saturation",
            "percentunit",
            (Query(f"max by (role) (kvrouter:pool_saturation{{{HERE}}})", "{{role}}"),),
            "Tokens in flight over what KV caches hold. Above 1, requests wait in engines.",
            warn=0.8,
            bad=0.9,
        ),
        Chart(
            "Tokens in flight by engine",
            "short",
            (Query(f"max by (engine) (kvrouter:worker_tokens{{{HERE}}})", "{{engine}}"),),
        ),
        Chart(
            "Engines up",
            "none",
            (
                Query(
                    f"min by (engine, role) (kvrouter:worker_up{{{HERE}}})", "{{engine}} {{role}}"
                ),
            ),
            "0 if one of the routers does not reach the engine.",
            top=1,
        ),
        Chart(
            "Circuit breakers",
            "none",
            (Query(f"max by (engine) (kvrouter:circuit_state{{{HERE}}})", "{{engine}}"),),
            "0 closed, 1 half open, 2 open.",
            top=2,
        ),
        Chart(
            "Failed legs",
            "reqps",
            (
                Query(
                    rate("kvrouter:upstream_errors_total", by="leg, reason"),
                    "{{leg}}: {{reason}}",
                ),
            ),
            "Another engine may have served the request.",
        ),
        Chart(
            "CPU of routers",
            "percentunit",
            (
                Query(
                    f'rate(process_cpu_seconds_total{{job="kvrouter", {HERE}}}[$__rate_interval])',
                    "{{instance}}",
                ),
            ),
            "A router has one event loop: one core is all that it can use.",
            warn=0.7,
            bad=0.85,
        ),
        Chart(
            "Memory of routers",
            "bytes",
            gauge("process_resident_memory_bytes", "instance", where=f'job="kvrouter", {HERE}'),
        ),
    ),
)

MODELS: Final[Row] = (
    "Models",
    (
        Chart(
            "Time to first token",
            "s",
            times("kvrouter:time_to_first_token_seconds", MODEL),
            warn=5,
            bad=10,
        ),
        Chart(
            "Where the time to the first token goes",
            "s",
            (
                Query(
                    "sum by (part) (rate(kvrouter:time_to_first_token_part_seconds_sum"
                    f"{{{HERE}}}[$__rate_interval])) / ignoring (part) group_left "
                    + rate(
                        "kvrouter:time_to_first_token_part_seconds_count", f'{HERE}, part="plan"'
                    ),
                    "{{part}}",
                ),
            ),
            "Mean of all models; the parts add up.",
            stacked=True,
        ),
        Chart("Time between tokens", "s", times("kvrouter:inter_token_latency_seconds", MODEL)),
        Chart("Time of a request", "s", times("kvrouter:e2e_request_latency_seconds", MODEL)),
        Chart(
            "Time in a queue",
            "s",
            times("kvrouter:request_queue_time_seconds", MODEL),
            "Of requests that could not begin at once.",
            warn=1,
            bad=5,
        ),
        Chart(
            "Requests by model",
            "reqps",
            by("kvrouter:request_success_total", "model", MODEL),
            stacked=True,
        ),
        Chart(
            "Failures by model",
            "reqps",
            (
                Query(
                    rate("kvrouter:request_errors_total", f"{MODEL}, {FAILED}", "model, code"),
                    "{{model}} {{code}}",
                ),
            ),
        ),
        Chart(
            "Prompt tokens by the place of their KV",
            "short",
            by("kvrouter:prefix_hit_tokens_total", "source", MODEL),
            "At the plan: in the decode engine, else in the store, else to be computed (none).",
            stacked=True,
        ),
        Chart(
            "Tokens generated",
            "short",
            by("kvrouter:generation_tokens_total", "model", MODEL),
            stacked=True,
        ),
        Chart(
            "Saturation by model",
            "percentunit",
            (
                Query(
                    f'max by (model) (kvrouter:model_saturation{{{MODEL}, model!=""}})', "{{model}}"
                ),
            ),
            warn=0.8,
            bad=0.9,
        ),
        Chart(
            "Requests for an alias",
            "reqps",
            (
                Query(
                    rate("kvrouter:alias_requests_total", MODEL, "alias, model"),
                    "{{alias}}: {{model}}",
                ),
            ),
            stacked=True,
        ),
        Chart(
            "Cache hits in engines",
            "percentunit",
            (
                Query(
                    'sum by (instance) (rate(vllm:prefix_cache_hits_total{job="engine"}'
                    "[$__rate_interval])) / sum by (instance) (rate("
                    'vllm:prefix_cache_queries_total{job="engine"}[$__rate_interval]))',
                    "{{instance}} own",
                ),
                Query(
                    'sum by (instance) (rate(vllm:external_prefix_cache_hits_total{job="engine"}'
                    "[$__rate_interval])) / sum by (instance) (rate("
                    'vllm:external_prefix_cache_queries_total{job="engine"}[$__rate_interval]))',
                    "{{instance}} store",
                ),
            ),
            "Prompt tokens found in the engine's own cache, and loaded from the store.",
            top=1,
        ),
    ),
)

TENANTS: Final[Row] = (
    "Tenants",
    (
        Chart("Requests by key", "reqps", by("kvrouter:key_requests_total", "key"), stacked=True),
        Chart("Tokens by key", "short", by("kvrouter:key_tokens_total", "key"), stacked=True),
        Chart(
            "Refused requests by key",
            "reqps",
            (Query(rate("kvrouter:key_refused_total", by="key, reason"), "{{key}}: {{reason}}"),),
        ),
        Chart(
            "Requests of keys in flight",
            "short",
            (Query(f"sum by (key) (kvrouter:key_requests_running{{{HERE}}})", "{{key}}"),),
            stacked=True,
        ),
        Chart(
            "Store memory by tenant",
            "bytes",
            (
                Query(f"sum by (tenant) (kvstore:tenant_used_bytes{{{HERE}}})", "{{tenant}}"),
                Query(
                    f"sum by (tenant) (kvstore:tenant_quota_bytes{{{HERE}}})", "{{tenant}} quota"
                ),
            ),
        ),
        Chart(
            "Limits of tenants in the store",
            "reqps",
            by("kvstore:tenant_limited_total", "tenant"),
            "Requests that were refused, or landed without their lease.",
        ),
    ),
)

STORE: Final[Row] = (
    "Store",
    (
        Chart(
            "Pool",
            "bytes",
            (
                Query(f"sum(kvstore:used_bytes{{{HERE}}})", "used"),
                Query(f"sum(kvstore:lent_bytes{{{HERE}}})", "lent"),
                Query(f"sum(kvstore:fenced_bytes{{{HERE}}})", "fenced"),
                Query(f"sum(kvstore:free_bytes{{{HERE}}})", "free"),
            ),
            "A full pool is normal: the node evicts.",
            stacked=True,
        ),
        Chart(
            "Blocks found",
            "percentunit",
            (
                Query(
                    f"{rate('kvstore:hits_total')} / ({rate('kvstore:hits_total')} + "
                    + rate("kvstore:misses_total", f'{HERE}, tier="disk"')
                    + ")",
                    "memory and disk",
                ),
            ),
            "Share of the blocks asked for.",
            top=1,
        ),
        Chart(
            "Blocks evicted",
            "short",
            by("kvstore:evictions_total", "reason"),
            "Evictions for capacity that grow together with misses: the pool is too small.",
        ),
        Chart(
            "Bytes in and out",
            "Bps",
            (
                Query(rate("kvstore:bytes_in_total", by="transport"), "in {{transport}}"),
                Query(rate("kvstore:bytes_out_total", by="transport"), "out {{transport}}"),
            ),
        ),
        Chart(
            "Load of the node's thread",
            "percentunit",
            by("kvstore:operation_seconds_sum", "operation"),
            stacked=True,
            warn=0.6,
            bad=0.8,
        ),
        Chart(
            "Time of operations, p99",
            "s",
            (
                Query(
                    quantile(0.99, "kvstore:operation_seconds", by="operation, le"),
                    "{{operation}}",
                ),
            ),
        ),
        Chart(
            "Blocks held",
            "short",
            (
                Query(f"sum(kvstore:leased_blocks{{{HERE}}})", "leased"),
                Query(f"sum(kvstore:pinned_blocks{{{HERE}}})", "pinned"),
                Query(f"sum(kvstore:reserved_blocks{{{HERE}}})", "being written"),
                Query(f"sum(kvstore:fenced_blocks{{{HERE}}})", "fenced"),
            ),
        ),
        Chart("Connections", "short", gauge("kvstore:connections", "instance", "transport")),
        Chart(
            "Writes and clients refused",
            "reqps",
            (
                Query(rate("kvstore:no_space_total"), "no space"),
                Query(rate("kvstore:client_limited_total"), "limit of a client"),
                Query(rate("kvstore:corrupt_total"), "wrong digest"),
                Query(rate("kvstore:unauthorized_total"), "no token"),
                Query(rate("kvstore:tls_failures_total"), "TLS"),
                Query(rate("kvstore:rejected_connections_total"), "too many connections"),
            ),
        ),
        Chart(
            "Disk in use",
            "bytes",
            (
                Query(f"sum(kvstore:disk_used_bytes{{{HERE}}})", "used"),
                Query(f"sum(kvstore:disk_bytes{{{HERE}}})", "size"),
            ),
        ),
        Chart(
            "Disk reads and writes",
            "Bps",
            (
                Query(rate("kvstore:disk_read_bytes_total"), "read"),
                Query(rate("kvstore:disk_written_bytes_total"), "written"),
            ),
        ),
        Chart(
            "Time from disk to memory",
            "s",
            times("kvstore:disk_promotion_seconds"),
        ),
        Chart(
            "Blocks that the disk missed",
            "short",
            by("kvstore:disk_skipped_total", "reason"),
        ),
        Chart("Disk errors", "short", by("kvstore:disk_errors_total", "kind")),
        Chart(
            "Disk bypassed",
            "none",
            gauge("kvstore:disk_bypassed", "instance", "reason"),
            "1 while the node works from memory alone.",
            top=1,
        ),
    ),
)

TRANSFERS: Final[Row] = (
    "Transfers",
    (
        Chart(
            "Landings",
            "reqps",
            by("kvrouter:landings_total", "outcome"),
            "Waits for the KV of a prefill leg.",
            stacked=True,
        ),
        Chart("Time from prefill to landing", "s", times("kvrouter:handoff_seconds")),
        Chart("Plans", "reqps", by("kvrouter:plans_total", "why"), stacked=True),
        Chart(
            "Recompute budget in use",
            "percentunit",
            (
                Query(
                    f"kvrouter:recompute_tokens{{{HERE}}}"
                    f" / kvrouter:recompute_max_tokens{{{HERE}}}",
                    "{{instance}}",
                ),
            ),
            "Prompts that decode engines compute because their KV is missing.",
            warn=0.5,
            bad=0.8,
        ),
        Chart(
            "KV events",
            "short",
            by("kvrouter:kv_event_total", "kind"),
        ),
        Chart(
            "Engine caches that the router knows",
            "short",
            (
                Query(
                    f"count by (state, reason) (kvrouter:kv_index_state{{{HERE}}})",
                    "{{state}}: {{reason}}",
                ),
            ),
            stacked=True,
        ),
        Chart(
            "Why an engine was chosen",
            "reqps",
            by("kvrouter:engines_chosen_total", "by"),
            stacked=True,
        ),
        Chart(
            "Streams whose engine broke off",
            "reqps",
            by("kvrouter:streams_broken_total", "outcome"),
        ),
        Chart(
            "Pairs that share no KV",
            "none",
            (
                Query(
                    f"max by (prefill, decode) (kvrouter:sharing_refused{{{HERE}}})",
                    "{{prefill}} and {{decode}}",
                ),
                Query(
                    f"max by (engine, reason) (kvstore:sharing_refused{{{HERE}}})",
                    "{{engine}}: {{reason}}",
                ),
            ),
            top=1,
        ),
        Chart(
            "Canary",
            "short",
            (
                Query(
                    f"sum by (outcome) (increase(kvrouter:canary_total{{{HERE}}}[1h]))",
                    "{{outcome}}",
                ),
            ),
            "Answers within an hour that an engine computed again alone. Diverged: wrong KV.",
        ),
        Chart(
            "Other routers",
            "none",
            gauge("kvrouter:replicas", "instance"),
            "How many routers of its group each router hears.",
        ),
        Chart(
            "Delay through Redis",
            "s",
            gauge("kvrouter:replica_lag_seconds", "instance"),
        ),
    ),
)

ROWS: Final = (FLEET, MODELS, TENANTS, STORE, TRANSFERS)


def variables() -> list[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    """What the reader chooses at the top."""
    everything = VariableOption(text="All", value="$__all", selected=True)
    asked = {
        "instance": 'label_values(up{job=~"kvrouter|kvstore"}, instance)',
        "model": 'label_values(kvrouter:prompt_tokens_total{instance=~"$instance"}, model)',
    }
    chosen = [
        dashboard.QueryVariable(name)
        .query({"query": query, "refId": name})
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
        for name, query in asked.items()
    ]
    return [dashboard.DatasourceVariable("datasource").type("prometheus"), *chosen]


def build() -> str:
    """The dashboard as JSON."""
    alerts = (
        dashboard.AnnotationQuery()
        .name("Alerts")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("red")
        .expr('ALERTS{alertname=~"Kv.*", alertstate="firing"}')
    )
    board = (
        dashboard.Dashboard("kvrouter")
        .uid("kvrouter")
        .tags(["kvrouter"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .annotation(alerts)
    )
    for variable in variables():
        board.with_variable(variable)
    numbers = count(1)
    for title, panels in ROWS:
        board.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            board.with_panel(panel.build(next(numbers)))
    return json.dumps(board.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(build(), end="")
