"""What deploy/ asks of Prometheus has answers: for a living fleet, scraped by a real one."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.deploy.monitored import TOKEN, break_a_stream, fleet, traffic
from tests.deploy.promql import filled, named
from tests.fakes.patience import until
from tests.fakes.prometheus import DEPLOY, MISSING, Prometheus, prometheus, prometheus_program
from tests.fakes.redis import MISSING as NO_REDIS
from tests.fakes.redis import RedisServer, redis_server

pytestmark = [
    pytest.mark.skipif(prometheus_program() is None, reason=MISSING),
    pytest.mark.skipif(redis_server() is None, reason=NO_REDIS),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]
DASHBOARD = DEPLOY.parent / "grafana/dashboards/kvrouter.json"
NOT_HERE = {
    "kvstore:sharing_refused": "only an engine of vLLM reports that it shares nothing",
    "vllm:kv_offload_tiering_promotion_allocation_failures_total": (
        "only an engine of vLLM has a host memory that can be full"
    ),
}
"""Metrics that appear only in trouble which cannot be made here."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scraped(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prometheus]:
    """A Prometheus that has scraped traffic and trouble, and goes on."""
    folder = tmp_path_factory.mktemp("monitored")
    with RedisServer(folder) as redis:
        async with (
            fleet(folder, redis.url) as here,
            prometheus(folder, here.targets, TOKEN) as found,
        ):
            async with traffic(here.router.http):
                await break_a_stream(here)
                yield found
            assert here.children.unexpected_deaths() == []


def panels() -> dict[str, str]:
    """Every query of the dashboard, by its panel."""
    return {
        f"{panel['title']} {target['refId']}": filled(target["expr"])
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", [])
    }


def rules(kind: str) -> dict[str, str]:
    """The expressions of rules: `record` or `alert`, by their names."""
    groups = yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"]
    every = [rule for group in groups for rule in group["rules"]]
    return {rule[kind]: rule["expr"] for rule in every if kind in rule}


async def test_every_query_of_the_dashboard_returns_data(scraped: Prometheus) -> None:
    wanted = {
        name: expr
        for name, expr in panels().items()
        if not {metric for metric, _ in named(expr).metrics} <= NOT_HERE.keys()
    }
    assert len(wanted) > 50
    assert await scraped.without_number(wanted) == []


async def test_every_recording_rule_records_something(scraped: Prometheus) -> None:
    records = rules("record")
    assert await scraped.without_number({name: name for name in records}) == []


async def test_every_metric_of_an_alert_exists(scraped: Prometheus) -> None:
    metrics = {metric for expr in rules("alert").values() for metric, _ in named(expr).metrics}
    assert len(metrics) > 30
    wanted = {metric: f"count({metric})" for metric in metrics - NOT_HERE.keys()}
    assert await scraped.without_number(wanted) == []


async def test_prometheus_evaluates_every_rule_without_an_error(scraped: Prometheus) -> None:

    async def evaluated() -> list[dict[str, Any]]:
        found = await scraped.rules()
        return [] if any(rule["health"] == "unknown" for rule in found) else found

    found = await until(evaluated, 60, look_s=0.2)
    assert [rule["name"] for rule in found if rule["health"] != "ok"] == []
    assert len(found) == len(rules("record")) + len(rules("alert"))


async def test_the_engine_that_died_and_the_pair_that_shares_nothing_raise_alarms(
    scraped: Prometheus,
) -> None:
    wanted = ("KvrouterEngineDown", "KvrouterSharingRefused")
    queries = {name: f'ALERTS{{alertname="{name}"}}' for name in wanted}
    assert await scraped.without_number(queries) == []
