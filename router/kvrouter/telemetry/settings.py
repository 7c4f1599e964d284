"""Settings of what is to be seen of a router: its log of requests, headers of answers, traces."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

_OTLP: Final = "opentelemetry.exporter.otlp.proto.http"
_TRACES: Final = "/v1/traces"


class ObservabilitySettings(BaseModel):
    """What a router tells of each request, and to whom."""

    access_log: bool = Field(
        default=True,
        description="Log one line per request, with what became of it; at --log-level info and "
        "below.",
    )
    route_headers: bool = Field(
        default=False,
        description="Tell clients in headers of answers which engines did it, how many tokens of "
        "the prompt were there already, and how long each part took (x-kvrouter-*, "
        "server-timing).",
    )
    otlp_traces_endpoint: str | None = Field(
        default=None,
        description="Collector that takes traces of requests by OTLP over HTTP, as "
        "http://HOST:4318 (/v1/traces is added). Needs kvrouter[otel].",
    )
    otlp_traces_sampling_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the requests that are traced, 0 to 1; of those without a trace of "
        "their own, unless --otlp-traces-client says otherwise.",
    )
    otlp_traces_client: Literal["follow", "join", "ignore"] = Field(
        default="follow",
        description="What a client's traceparent decides: follow, its trace goes on and is "
        "recorded where the client records it; join, it goes on and is recorded by the ratio; "
        "ignore, nothing. Before strangers, who could have everything recorded, take join or "
        "ignore.",
    )

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _collector(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"traces are sent by OTLP over HTTP, not to {value!r}: give it as http://HOST:4318"
            )
        if not _there(_OTLP):
            raise ValueError("it needs OpenTelemetry: pip install 'kvrouter[otel]'")
        if parts.path in ("", "/"):
            return value.rstrip("/") + _TRACES
        return value


def _there(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
