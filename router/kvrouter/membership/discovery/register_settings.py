"""Settings of `kvrouter register`: flags > environment > YAML file > default."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvrouter.credentials.settings import EngineTrustSettings
from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import Members, both_roles
from kvrouter.membership.discovery.redis import MAX_TTL_S
from kvrouter.options.addresses import parse_address
from kvrouter.options.types import Texts  # noqa: TC001 (pydantic reads it)
from kvrouter.redis.settings import RedisSettings


class RegisterSettings(RedisSettings, EngineTrustSettings, BaseSettings):
    """Settings of `kvrouter register`."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_", extra="forbid")

    prefill: Texts = Field(
        default_factory=list,
        description="Engines for prefill legs, as URL or HOST:PORT by which routers reach them. "
        "An engine named here and under --decode takes both legs.",
    )
    decode: Texts = Field(
        default_factory=list, description="Engines for decode legs, as URL or HOST:PORT."
    )
    ttl_s: float = Field(
        default=15.0,
        ge=0.5,
        le=MAX_TTL_S,
        description="Seconds after which an entry goes that is not renewed; it is renewed three "
        "times as often while the engine's /health answers.",
        json_schema_extra={"flags": ["--ttl"]},
    )
    health_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds that an engine may take to answer a health check."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged."
    )

    @field_validator("prefill", "decode")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(parse_address(item) for item in value))

    @model_validator(mode="after")
    def _something_to_do(self) -> RegisterSettings:
        if not self.redis.get_secret_value():
            raise ValueError("no Redis to register in: give --redis redis://HOST:PORT/DB")
        if not self.members:
            raise ValueError("no engine to register: give --prefill URL or --decode URL")
        return self

    @property
    def members(self) -> Members:
        """The engines, with their roles."""
        said = [(address, Role.PREFILL) for address in self.prefill]
        return both_roles([*said, *((address, Role.DECODE) for address in self.decode)])
