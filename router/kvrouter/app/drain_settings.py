"""Settings of how the router leaves."""

from __future__ import annotations

from pydantic import BaseModel, Field


class DrainSettings(BaseModel):
    """How long load balancers and requests under way get when the router is told to stop."""

    drain_delay_s: float = Field(
        default=5.0,
        ge=0,
        description="Seconds after SIGTERM for which new connections are still accepted, while "
        "/health and /ready answer 503 and every answer closes its connection: load balancers need "
        "them to notice. They count towards --drain-timeout. SIGINT (Ctrl-C) skips them.",
        json_schema_extra={"flags": ["--drain-delay"]},
    )
    drain_timeout_s: float = Field(
        default=25.0,
        ge=0,
        description="Seconds after SIGTERM or SIGINT that requests under way get to end; then "
        "streams end with an error event and other requests are answered 503. Let whoever kills "
        "the process wait at least 5 s longer.",
        json_schema_extra={"flags": ["--drain-timeout"]},
    )
