"""Traces on their way to a collector as OTLP over HTTP, from the exporter's thread alone.

OpenTelemetry is known to this module, `encode` and `collector`, which are imported in the process
of a router that traces. What its SDK reads of the environment (OTEL_SERVICE_NAME, ...) holds.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource

from kvrouter.tracing.collector import Collector
from kvrouter.tracing.config import OtlpSettings
from kvrouter.tracing.encode import Encoder

if TYPE_CHECKING:
    from kvrouter.tracing.trace import Trace

_UNNAMED: Final = "unknown_service"

log = logging.getLogger(__name__)


class OtlpSender:
    """Sends traces to one collector; to be called in one thread.

    Args:
        endpoint: URL of its traces, as http://HOST:4318/v1/traces.
        instance: which router this is, as HOST:PORT.
    """

    def __init__(self, endpoint: str, instance: str) -> None:
        release = version("kvrouter")
        self._encoder = Encoder(resource_of(instance, release).attributes, release)
        self._collector = Collector(endpoint, f"kvrouter/{release}", OtlpSettings())

    def send(self, traces: list[Trace]) -> bool:
        """Whether the collector took all of them."""
        try:
            return self._collector.send(self._encoder.encode(traces))
        except Exception:  # the thread must live on, whatever the library or a proxy does
            log.debug("traces: they could not be sent", exc_info=True)
            return False


def resource_of(instance: str, release: str) -> Resource:
    """What the router `instance` is, with what the environment says of it."""
    named = Resource.create({SERVICE_VERSION: release})
    if str(named.attributes.get(SERVICE_NAME, _UNNAMED)).startswith(_UNNAMED):
        named = named.merge(Resource({SERVICE_NAME: "kvrouter"}))
    return named.merge(Resource({"service.instance.id": instance}))
