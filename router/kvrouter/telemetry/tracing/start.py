"""Starts tracing, if the settings of the router ask for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from kvrouter.telemetry.series import Reading
from kvrouter.telemetry.tracing.trace import Tracing

if TYPE_CHECKING:
    from kvrouter.telemetry.metrics import Metrics
    from kvrouter.telemetry.settings import ObservabilitySettings
    from kvrouter.telemetry.tracing.otlp import Exporter


SWITCH_S: Final = 0.0005
"""Longest time that the SDK's thread keeps the interpreter; a tenth of Python's default."""


def start_traces(
    settings: ObservabilitySettings, service: str, metrics: Metrics
) -> tuple[Tracing, Exporter] | tuple[None, None]:
    """The sampler and the exporter, which its owner must close; None without tracing.

    `service` is the instance id of this router, HOST:PORT.
    """
    endpoint = settings.otlp_traces_endpoint
    if endpoint is None:
        return None, None
    from kvrouter.telemetry.tracing.otlp import otlp_exporter  # noqa: PLC0415 - an extra, not a dependency

    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))  # a batch takes milliseconds
    exporter = otlp_exporter(endpoint, service)
    reading = Reading(
        "kvrouter:trace_spans",
        "Spans of traces: exported, or dropped because the collector refused them or was slow.",
        exporter.counts,
        ["outcome"],
        grows=True,
    )
    metrics.add(reading)
    ratio, client = settings.otlp_traces_sampling_ratio, settings.otlp_traces_client
    return Tracing(ratio, client, exporter.take), exporter
