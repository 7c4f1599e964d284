"""How panels look: units, legends, thresholds. Grafana's own SDK builds them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_uppercase
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
class Chart:
    """Series over time.

    unit: Grafana's name of it. series: expressions by their legends. text: what the title does not
    say. stacked: whether they add up. warn, bad: from where values are yellow and red, with a line
    in the chart. top: of the axis.
    """

    title: str
    unit: str
    series: Mapping[str, str]
    text: str = ""
    stacked: bool = False
    warn: float | None = None
    bad: float | None = None
    top: float | None = None

    def build(self, number: int, tokens: Mapping[str, str]) -> timeseries.Panel:
        """The panel; `number` is its id, `tokens` what stands for words of its expressions."""
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
            .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
        )
        if self.top is not None:
            panel.max(self.top)
        if self.stacked:
            normal = common_models.StackingMode.NORMAL
            panel.stacking(common.StackingConfig().mode(normal).group("A"))
        if self.warn is not None:
            line = common_models.GraphThresholdsStyleMode.DASHED
            panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(line))
        for letter, (legend, expr) in zip(ascii_uppercase, self.series.items(), strict=False):
            panel.with_target(_target(letter, _written(expr, tokens), legend))
        return panel


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, its colour by thresholds; `falls`: whether a low value is the bad one."""

    title: str
    unit: str
    expr: str
    warn: float
    bad: float
    falls: bool = False

    def build(self, number: int, tokens: Mapping[str, str]) -> stat.Panel:
        """The panel; as for a chart."""
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
            .with_target(_target("A", _written(self.expr, tokens), ""))
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


def _written(expr: str, tokens: Mapping[str, str]) -> str:
    return re.sub(rf"\b({'|'.join(tokens)})\b", lambda found: tokens[found[1]], expr)


def _target(letter: str, expr: str, legend: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(letter)
        .datasource(SOURCE)
        .expr(expr)
        .legend_format(legend)
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
