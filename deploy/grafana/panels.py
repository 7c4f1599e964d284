"""How panels look: units, legends, thresholds. Grafana's own SDK builds them."""

from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
)

SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH: Final = 8
HEIGHT: Final = 8


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over time.

    unit: Grafana's name of it. text: what the title does not say. stacked: whether they add up.
    warn, bad: from where values are yellow and red, with a line in the chart.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""
    stacked: bool = False
    warn: float | None = None
    bad: float | None = None
    top: float | None = None

    def build(self, number: int) -> timeseries.Panel:
        """The panel; `number` is its id."""
        limits = [each for each in (self.warn, self.bad) if each is not None]
        panel = (
            timeseries.Panel()
            .id(number)
            .title(self.title)
            .description(self.text)
            .datasource(SOURCE)
            .span(WIDTH)
            .height(HEIGHT)
            .unit(self.unit)
            .min(0)
            .legend(_LEGEND)
            .tooltip(_TOOLTIP)
            .fill_opacity(30 if self.stacked else 8)
            .show_points(common_models.VisibilityMode.NEVER)
            .thresholds(_thresholds(self.warn, self.bad))
        )
        if self.top is not None:
            panel.max(self.top)
        if self.stacked:
            normal = common_models.StackingMode.NORMAL
            panel.stacking(common.StackingConfig().mode(normal).group("A"))
        if limits:
            line = common_models.GraphThresholdsStyleMode.DASHED
            panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(line))
        for query, letter in zip(self.queries, "ABCDEFGH", strict=False):
            panel.with_target(_target(query, letter))
        return panel


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, its colour by thresholds; `falls`: whether a low value is the bad one."""

    title: str
    unit: str
    query: Query
    warn: float
    bad: float
    falls: bool = False

    def build(self, number: int) -> stat.Panel:
        """The panel; `number` is its id."""
        colours = (self.bad, self.warn) if self.falls else (self.warn, self.bad)
        return (
            stat.Panel()
            .id(number)
            .title(self.title)
            .datasource(SOURCE)
            .span(4)
            .height(4)
            .unit(self.unit)
            .thresholds(_thresholds(*colours, falls=self.falls))
            .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
            .graph_mode(common_models.BigValueGraphMode.AREA)
            .with_target(_target(self.query, "A"))
        )


_LEGEND: Final = (
    common.VizLegendOptions()
    .show_legend(True)
    .display_mode(common_models.LegendDisplayMode.TABLE)
    .placement(common_models.LegendPlacement.BOTTOM)
    .calcs(["mean", "max", "lastNotNull"])
)
_TOOLTIP: Final = (
    common.VizTooltipOptions()
    .mode(common_models.TooltipDisplayMode.MULTI)
    .sort(common_models.SortOrder.DESCENDING)
)


def _target(query: Query, letter: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(letter)
        .datasource(SOURCE)
        .expr(query.expr)
        .legend_format(query.legend)
        .range()
    )


def _thresholds(
    first: float | None, second: float | None, *, falls: bool = False
) -> dashboard.ThresholdsConfig:
    colours = ("red", "yellow", "green") if falls else ("green", "yellow", "red")
    steps = [
        Threshold(value=value, color=colour)
        for value, colour in zip((None, first, second), colours, strict=True)
        if value is not None or colour == colours[0]
    ]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
