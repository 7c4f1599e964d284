"""Settings of the canary, which computes a few answers again and compares them."""

from __future__ import annotations

from pydantic import BaseModel, Field


class CanarySettings(BaseModel):
    """How many answers are computed again, and when."""

    canary_sample_rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the comparable (greedy) requests whose answer the decode engine "
        "computes once more, alone. Tokens that differ raise an alarm.",
        json_schema_extra={"section": "Canary"},
    )
    canary_max_tokens: int = Field(
        default=8192,
        ge=1,
        description="Sample only requests whose prompt and answer have at most this many tokens.",
        json_schema_extra={"metavar": "TOKENS"},
    )
    canary_below_requests: int = Field(
        default=4,
        ge=1,
        description="Ask an engine only while it has fewer requests of this router in flight, and "
        "no request waits in the queue.",
    )
    canary_near_tie: float = Field(
        default=0.5,
        ge=0,
        description="Accept either of two tokens whose log-probabilities differ by at most this.",
    )
