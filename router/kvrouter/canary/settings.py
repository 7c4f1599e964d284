"""Settings of the canary, which computes a few answers again and compares them."""

from __future__ import annotations

from pydantic import BaseModel, Field


class CanarySettings(BaseModel):
    """How many answers are computed again, and when."""

    canary_sample_rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the requests that can be compared (greedy ones) which are computed "
        "once more by their decode engine alone, as 0.01: tokens that differ are an alarm.",
    )
    canary_max_tokens: int = Field(
        default=8192,
        ge=1,
        description="Tokens of prompt and answer up to which a request is sampled for the canary.",
    )
    canary_below_requests: int = Field(
        default=4,
        ge=1,
        description="The canary asks an engine only while fewer requests of this router than so "
        "many are under way on it, and none waits in the queue.",
    )
    canary_near_tie: float = Field(
        default=0.5,
        ge=0,
        description="Difference of the log-probabilities of two tokens up to which the canary "
        "takes either for right.",
    )
