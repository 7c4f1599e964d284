"""Settings of observability: logs, headers of answers, traces."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, Field, field_validator

from kvrouter.options.types import LogLevel  # noqa: TC001 (pydantic reads it)
from kvrouter_store.node.settings import LogFormat  # noqa: TC001 (pydantic reads it)

_OTLP: Final = "opentelemetry.exporter.otlp.proto.http"
_TRACES: Final = "/v1/traces"


class ObservabilitySettings(BaseModel):
    """What the router reports of each request, and where."""

    log_level: LogLevel = Field(
        default="info",
        description="Lowest severity that the router logs.",
        json_schema_extra={"section": "Logs and traces"},
    )
    log_format: LogFormat = "auto"
    access_log: bool = Field(
        default=True,
        description="Log one line per request with its outcome, at --log-level info or debug.",
    )
    record: str | None = Field(
        default=None,
        description="Write a line into this file for each prompt that engines got, as a Mooncake "
        "trace: salted names of blocks, lengths and times, no text.",
        json_schema_extra={"metavar": "PATH"},
    )
    record_max_bytes: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=1 << 16,
        description="Most bytes of the record. With half of them, the file is renamed to PATH.1, "
        "in place of the one before.",
    )
    route_headers: bool = Field(
        default=False,
        description="Add headers to answers (x-kvrouter-*, server-timing): which engines worked "
        "on the request, how many prompt tokens were cached, and how long each part took.",
    )
    otlp_traces_endpoint: str | None = Field(
        default=None,
        description="Collector of traces by OTLP over HTTP, as http://HOST:4318 (the router adds "
        "/v1/traces). Needs kvrouter[otel].",
        json_schema_extra={"metavar": "URL"},
    )
    otlp_traces_sampling_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the requests that the router traces. Clients with a traceparent "
        "may decide otherwise, see --otlp-traces-client.",
    )
    otlp_traces_client: Literal["follow", "join", "ignore"] = Field(
        default="follow",
        description="What a client's traceparent decides. follow: the router continues the "
        "client's trace, and records it if the client does. join: it continues the trace, and "
        "records it by the sampling ratio. ignore: nothing. Choose join or ignore for clients "
        "that you do not trust, because with follow a client can have every request recorded.",
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
