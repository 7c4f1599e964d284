"""Settings of what is to be seen of a router: its log of requests, headers of answers."""

from __future__ import annotations

from pydantic import BaseModel, Field


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
