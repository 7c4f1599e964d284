"""Writes docs/metrics.md from the metrics that the router, a store node and a simulator register.

`python -m kvrouter.tools.docs.metrics > docs/metrics.md`. The router runs with every option that
adds metrics.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvrouter.app.build import build
from kvrouter.app.settings import RouterSettings
from kvrouter.fates.fate import Fate
from kvrouter.tools.docs.markdown import table
from kvrouter.tools.sim.metrics import SimMetrics
from kvrouter_store.node.metrics import FAMILIES, SHARING_REFUSED, TENANT_FAMILIES, TIER_FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

HEAD: Final = """\
# Metrics

<!-- Written by `python -m kvrouter.tools.docs.metrics`; do not edit. -->

All metrics of the router, of a store node and of a simulated engine, as Prometheus scrapes them at
`/metrics`. A histogram has `_bucket`, `_sum` and `_count`. If vLLM has a metric of the same
meaning, the name after the colon and the buckets are those of vLLM, so that its dashboards fit. The
series of an engine end when the engine leaves. Start with [observability](observability.md).

The label `model` is a model that engines serve or served. It is empty while the model is unknown,
as for a request without a valid key, and `other` from the 101st model on.
"""
EVERYTHING: Final[dict[str, Any]] = {
    "decode": ["127.0.0.1:1"],
    "store": "kv://127.0.0.1:1",
    "kv_events_bind": "tcp://127.0.0.1:0",
    "store_events_connect": "1",
    "store_events_replay": "2",
    "redis": "redis://127.0.0.1:1/0",
    "policy": "planner",
    "admin": True,
    "otlp_traces_endpoint": "http://127.0.0.1:1",
    "canary_sample_rate": 1,
    "port": 0,
}
"""Settings of a router that has every metric. Its peers do not exist."""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric: its name in a scrape, type, labels and help."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


async def router_rows() -> list[Row]:
    """The metrics of a router with every option, which runs for a moment."""
    app = build(RouterSettings(**EVERYTHING))
    try:
        await app.start()
        return rows_of(app.core.metrics.families())
    finally:
        await app.close()


def store_rows() -> list[Row]:
    """The metrics of a store node."""
    families = (*FAMILIES, *TENANT_FAMILIES, *TIER_FAMILIES, SHARING_REFUSED)
    return [Row(one.name, one.kind, one.labels, one.help) for one in families]


def simulator_rows() -> list[Row]:
    """The metrics of a simulated engine."""
    return rows_of(SimMetrics("m", 16, 1).registry.collect())


def connector_rows() -> list[Row]:
    """Those of vLLM that say more with the connector."""
    name = "vllm:kv_offload_tiering_promotion_allocation_failures_total"
    text = "Blocks that the store has and that are computed, for the host memory has no room."
    return [Row(name, "counter", ("model_name", "engine"), text)]


def rows_of(families: Iterable[Metric]) -> list[Row]:
    """A row for each family."""
    rows = []
    for family in families:
        labels = getattr(family, "_labelnames", None)
        if labels is None:  # counters of prometheus_client itself
            labels = family.samples[0].labels if family.samples else ()
        suffix = "_total" if family.type == "counter" else ""
        shown = tuple(label for label in labels if label != "le")
        rows.append(Row(family.name + suffix, family.type, shown, family.documentation))
    return rows


def metrics_page(router: Iterable[Row]) -> str:
    """The whole page, in Markdown."""
    sections = [HEAD]
    for title, rows in (
        ("The router", router),
        ("A store node", store_rows()),
        ("A simulated engine", simulator_rows()),
        ("vLLM with the connector, besides its own", connector_rows()),
    ):
        cells = [
            (f"`{row.name}`", row.kind, ", ".join(f"`{label}`" for label in row.labels), row.help)
            for row in rows
        ]
        body = table(("Metric", "Type", "Labels", "Meaning"), cells)
        sections.append(f"\n## {title}\n\n{body}\n")
    fates = [(f"`{fate}`", fate.words, fate.remedy) for fate in Fate]
    body = table(("Fate", "Meaning", "What to do"), fates)
    return "".join([*sections, f"\n## Fates of prompt tokens\n\n{body}\n"])


if __name__ == "__main__":
    print(metrics_page(asyncio.run(router_rows())), end="")
