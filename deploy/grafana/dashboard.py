"""Prints the dashboard; `make monitoring` writes it to `dashboards/kvrouter.json`.

What it shows stands in `rows.py`; how panels look, in `panels.py`.
"""

import json
from itertools import count

from deploy.grafana.panels import SOURCE
from deploy.grafana.rows import ROWS, TOKENS
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    VariableOption,
    VariableRefresh,
)


def build() -> str:
    """The dashboard as JSON."""
    board = (
        dashboard.Dashboard("kvrouter")
        .uid("kvrouter")
        .tags(["kvrouter"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .annotation(_alerts())
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(_chosen("instance", 'up{job=~"kvrouter|kvstore"}'))
        .with_variable(_chosen("model", 'kvrouter:prompt_tokens_total{instance=~"$instance"}'))
    )
    numbers = count(1)
    for title, panels in ROWS.items():
        board.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            board.with_panel(panel.build(next(numbers), TOKENS))
    return json.dumps(board.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _chosen(name: str, series: str) -> dashboard.QueryVariable:
    """What the reader chooses at the top: values of a label of `series`, at first all."""
    return (
        dashboard.QueryVariable(name)
        .query({"query": f"label_values({series}, {name})", "refId": name})
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all", selected=True))
    )


def _alerts() -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery()
        .name("Alerts")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("red")
        .expr('ALERTS{alertname=~"Kv.*", alertstate="firing"}')
    )


if __name__ == "__main__":
    print(build(), end="")
