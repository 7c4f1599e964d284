"""The alerts, the dashboard and the runbooks agree with each other and with the product."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.grafana.dashboard import build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from tests.deploy.promql import TARGET_LABELS, filled, named
from tests.fakes.prometheus import MISSING, prometheus_program
from tests.test_docs import anchors

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RUNBOOKS = ROOT / "docs/runbooks.md"
DASHBOARD = DEPLOY / "grafana/dashboards/kvrouter.json"
PROVISIONING = DEPLOY / "grafana/provisioning"
COMPONENT = DEPLOY / "kubernetes/components/monitoring"
METRIC_ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \| ([^|]*) \|", re.MULTILINE)
METRIC_NAME = re.compile(r"\b(?:kvrouter|kvstore|vllm|kvsim):[a-z_0-9]+|\bprocess_[a-z_]+")
OF_PROMETHEUS = {"up": set[str](), "ALERTS": {"alertname", "alertstate", "severity"}}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def rules() -> list[dict[str, Any]]:
    groups = read(DEPLOY / "prometheus/rules.yml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = [rule for rule in rules() if "alert" in rule]
RECORDS = [rule for rule in rules() if "record" in rule]
BY_ALERT = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])


@cache
def labels() -> dict[str, set[str]]:
    """The labels of every series that there can be, by its name."""
    found: dict[str, set[str]] = {**OF_PROMETHEUS}
    for name, kind, names in METRIC_ROW.findall((ROOT / "docs/metrics.md").read_text()):
        own = set(re.findall(r"`(\w+)`", names))
        found[name] = own
        if kind == "histogram":
            found |= {f"{name}_bucket": own | {"le"}, f"{name}_sum": own, f"{name}_count": own}
    for rule in RECORDS:
        level = rule["record"].split(":")[0]
        found[rule["record"]] = set() if level == "objective" else set(level.split("_"))
    return found


def wrong(expr: str) -> list[str]:
    """What an expression names and nothing has."""
    known, asked = labels(), named(expr)
    there = TARGET_LABELS.union(*(known.get(metric, set()) for metric, _ in asked.metrics))
    return [
        *(metric for metric, _ in asked.metrics if metric not in known),
        *(
            f"{metric}: {label}"
            for metric, names in asked.metrics
            for label in names - TARGET_LABELS - known.get(metric, set())
        ),
        *(f"by {label}" for label in asked.grouped - there),
    ]


def queries() -> list[str]:
    """Every expression of the dashboard."""
    board = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    return [*targets, *(each["expr"] for each in board["annotations"]["list"])]


def legends() -> list[tuple[str, str]]:
    board = json.loads(DASHBOARD.read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    return [(target["expr"], target["legendFormat"]) for target in targets]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_names_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    assert wrong(rule["expr"]) == []


def test_the_dashboard_names_metrics_and_labels_that_exist() -> None:
    assert [(expr, found) for expr in queries() if (found := wrong(filled(expr)))] == []


def test_a_legend_names_labels_of_its_series() -> None:
    for expr, legend in legends():
        asked = named(filled(expr))
        there = TARGET_LABELS.union(*(labels()[metric] for metric, _ in asked.metrics))
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= there, (expr, legend)


def test_metrics_in_the_runbooks_exist() -> None:
    told = set(METRIC_NAME.findall(RUNBOOKS.read_text()))
    assert told
    assert told - labels().keys() == set()


def test_a_metric_that_is_misspelt_is_found() -> None:
    assert wrong('sum by (rank) (rate(kvrouter:plan_total{why="prefill"}[5m]))') == [
        "kvrouter:plan_total",
        "kvrouter:plan_total: why",
        "by rank",
    ]


@BY_ALERT
def test_an_alert_says_how_grave_it_is_and_leads_to_its_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert alert["annotations"].keys() == {"summary", "runbook_url", "dashboard_url"}
    nobody = alert["alert"] == "KvrouterAbsent"
    assert nobody or "$labels." in alert["annotations"]["summary"], "it does not say who"
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert ROOT / path == RUNBOOKS
    assert anchor == alert["alert"].lower()
    assert anchor in anchors(RUNBOOKS)
    assert alert["annotations"]["dashboard_url"].startswith("/d/kvrouter")
    assert "for" in alert


def test_every_runbook_is_of_an_alert_and_has_its_answers() -> None:
    """What an alert means is in its summary, and in the runbook where there is more to say."""
    sections = re.split(r"^### (\w+)$", RUNBOOKS.read_text(), flags=re.MULTILINE)[1:]
    assert sorted(sections[::2]) == sorted(alert["alert"] for alert in ALERTS)
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        answers = re.findall(r"^- ([\w ]+):", text, re.MULTILINE)
        told = [answer for answer in answers if answer != "Meaning"]
        assert answers in (told, ["Meaning", *told]), name
        assert told in (["Clients", "Look", "Do"], ["Clients", "Look and do"]), name


def fired() -> dict[str, set[str]]:
    """The labels of the alerts that fire in the test of the rules, by name."""
    found: dict[str, set[str]] = {}
    for test in read(DEPLOY / "prometheus/rules_test.yml")["tests"]:
        for asked in test["promql_expr_test"]:
            for sample in asked["exp_samples"]:
                seen = dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"]))
                if "alertname" in seen:
                    found.setdefault(seen["alertname"], set()).update(seen)
    return found


@BY_ALERT
def test_an_alert_fires_in_the_test_of_the_rules_with_what_its_summary_names(
    alert: dict[str, Any],
) -> None:
    texts = " ".join(alert["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= fired()[alert["alert"]]


def test_promtool_accepts_the_rules_and_their_test() -> None:
    promtool = prometheus_program("promtool")
    if promtool is None:
        pytest.skip(MISSING)
    folder = DEPLOY / "prometheus"
    for command in (("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")):
        done = subprocess.run(
            [promtool, *command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_scrapes_the_services_of_compose() -> None:
    scraped = {
        job["job_name"]: {target for each in job["static_configs"] for target in each["targets"]}
        for job in read(DEPLOY / "prometheus/prometheus.yml")["scrape_configs"]
    }
    services = read(DEPLOY / "docker-compose.yml")["services"]
    engines = {name for name in services if name.startswith(("prefill-", "decode-"))}
    assert engines
    assert scraped == {
        "kvrouter": {"router:8000"},
        "kvstore": {"store:7480"},
        "engine": {f"{name}:8000" for name in engines},
    }


def test_the_dashboard_is_what_its_description_says() -> None:
    assert DASHBOARD.read_text() == build(), "run make monitoring"


def test_grafana_knows_every_member_of_the_dashboard() -> None:
    register_default_plugins()
    board = json.loads(DASHBOARD.read_text())
    again = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert again == board


def test_every_panel_has_a_unit_a_legend_and_a_place_of_its_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [
        *("Fleet", "Models", "Tenants", "Store", "Transfers")
    ]
    for panel in panels:
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            if len(panel["targets"]) > 1:
                assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_grafana_is_given_a_source_and_the_folder_of_the_dashboard() -> None:
    sources = read(PROVISIONING / "datasources/prometheus.yml")
    providers = read(PROVISIONING / "dashboards/kvrouter.yml")
    assert sources.keys() == {"apiVersion", "datasources"}
    assert providers.keys() == {"apiVersion", "providers"}
    assert sources["apiVersion"] == providers["apiVersion"] == 1
    (source,), (provider,) = sources["datasources"], providers["providers"]
    assert source.keys() == {
        *("name", "uid", "type", "access", "url", "isDefault", "jsonData"),
    }
    assert (source["type"], source["access"]) == ("prometheus", "proxy")
    ours = read(DEPLOY / "prometheus/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"] == {"timeInterval": ours}
    assert provider.keys() == {"name", "type", "allowUiUpdates", "options"}
    assert provider["type"] == "file"
    assert provider["options"] == {"path": "/etc/grafana/dashboards"}


def test_kubernetes_gets_the_same_rules_jobs_and_dashboard() -> None:
    rule = read(COMPONENT / "rules.yaml")
    assert rule["spec"] == read(DEPLOY / "prometheus/rules.yml"), "run make monitoring"
    monitors = [*yaml.safe_load_all((COMPONENT / "scrape.yaml").read_text())]
    jobs = [
        relabeling["replacement"]
        for monitor in monitors
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        for relabeling in endpoint["relabelings"]
        if relabeling["targetLabel"] == "job"
    ]
    scraped = read(DEPLOY / "prometheus/prometheus.yml")["scrape_configs"]
    assert jobs == [job["job_name"] for job in scraped]
    (made,) = read(DEPLOY / "grafana/kustomization.yaml")["configMapGenerator"]
    assert made["files"] == [str(DASHBOARD.relative_to(DEPLOY / "grafana"))]
    assert made["options"]["labels"] == {"grafana_dashboard": "1"}
