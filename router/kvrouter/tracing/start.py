"""Starts the traces of a router, where its settings ask for them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from kvrouter.metrics import Reading
from kvrouter.tracing.exporter import Exporter
from kvrouter.tracing.trace import Tracing

if TYPE_CHECKING:
    from kvrouter.config import RouterSettings
    from kvrouter.metrics import Metrics


SWITCH_S: Final = 0.0005
"""How long the exporter's thread may keep the interpreter from the loop: a tenth of the default."""


def start_traces(
    settings: RouterSettings, metrics: Metrics
) -> tuple[Tracing, Exporter] | tuple[None, None]:
    """What decides and what sends, which its owner must close; None where nothing is traced."""
    endpoint = settings.otlp_traces_endpoint
    if endpoint is None:
        return None, None
    from kvrouter.tracing.otlp import OtlpSender  # noqa: PLC0415 - an extra, not a dependency

    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))  # a batch takes milliseconds
    sender = OtlpSender(endpoint, f"{settings.host}:{settings.port}")
    exporter = Exporter(sender.send, endpoint)
    reading = Reading(
        "kvrouter:trace_spans",
        "Spans of traces: exported, or dropped since the collector refused them or was too slow.",
        exporter.counts,
        ["outcome"],
        grows=True,
    )
    metrics.add(reading)
    ratio, client = settings.otlp_traces_sampling_ratio, settings.otlp_traces_client
    return Tracing(ratio, client, exporter.take), exporter
