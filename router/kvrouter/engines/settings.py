"""Settings of engines that fail: time-outs, further attempts, circuit breakers."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kvrouter.engines.breaker import BreakerLimits
from kvrouter.engines.life import LifeLimits
from kvrouter.http.client.pool import Deadlines


class FailoverSettings(BaseModel):
    """When an engine has failed, and what follows."""

    request_timeout_s: float = Field(
        default=Deadlines().first_byte_s,
        gt=0,
        description="Longest time until the first byte of an engine's answer, and, without "
        "--stream-idle-timeout, between two of its bytes. Comments in a stream do not count.",
        json_schema_extra={"section": "Engines that fail", "flags": ["--request-timeout-secs"]},
    )
    stream_idle_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Longest time between two bytes of an engine's answer. By default "
        "--request-timeout.",
    )
    connect_timeout_s: float = Field(
        default=Deadlines().connect_s,
        gt=0,
        description="Longest time until an engine has accepted a connection.",
    )
    engine_stall_timeout_s: float = Field(
        default=LifeLimits().stall_s,
        gt=0,
        description="Longest time in which an engine may give nothing to its streams while its "
        "counters of tokens stand still. After that it is taken for dead, though it may answer "
        "health checks: its requests end or go to another engine. It may always take 20 times as "
        "long as lately between two events, and 6 times this time if it has no counters. The last "
        "engine of a model stays.",
    )
    retry_max_attempts: int = Field(
        default=3,
        ge=1,
        description="Engines that the router asks at most for one leg of a request, the first one "
        "included; 1: it asks no other engine. It never asks another one once the client has a "
        "byte of the answer.",
    )
    cb_failure_threshold: int = Field(
        default=BreakerLimits().threshold,
        ge=1,
        description="Circuit breaker: after so many failed legs in a row an engine gets no more "
        "requests for a while.",
    )
    cb_timeout_s: float = Field(
        default=BreakerLimits().cooldown_s,
        gt=0,
        description="How long an open circuit breaker keeps requests away, until it lets one pass "
        "as a trial. The time doubles with each trial that fails, up to --cb-max-timeout.",
        json_schema_extra={"flags": ["--cb-timeout-duration-secs"]},
    )
    cb_max_timeout_s: float = Field(
        default=BreakerLimits().max_cooldown_s,
        gt=0,
        description="Longest time between two trials; at least --cb-timeout.",
    )

    @property
    def deadlines(self) -> Deadlines:
        """Of every leg."""
        idle_s = self.stream_idle_timeout_s or self.request_timeout_s
        return Deadlines(self.connect_timeout_s, self.request_timeout_s, idle_s)

    @property
    def breaker_limits(self) -> BreakerLimits:
        """Of every engine."""
        return BreakerLimits(self.cb_failure_threshold, self.cb_timeout_s, self.cb_max_timeout_s)
