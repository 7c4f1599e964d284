"""Settings of `kvrouter register`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from kvrouter.credentials.settings import EngineTrustSettings
from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import Members, both_roles
from kvrouter.membership.discovery.redis import MAX_TTL_S
from kvrouter.options.settings import Settings
from kvrouter.options.types import Addresses, LogLevel, StoreUrls, unique_stores
from kvrouter.redis.settings import RedisSettings


class RegisterSettings(RedisSettings, EngineTrustSettings, Settings):
    """Settings of `kvrouter register`."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_")

    prefill: Addresses = Field(
        default_factory=list,
        description="Engines for prefill legs, as URL or HOST:PORT by which routers reach them. "
        "An engine that --decode names too takes both legs.",
        json_schema_extra={"section": "Engines"},
    )
    decode: Addresses = Field(
        default_factory=list,
        description="Engines for decode legs, as URL or HOST:PORT.",
    )
    store: Annotated[StoreUrls, AfterValidator(unique_stores)] = Field(
        default_factory=list,
        description="Nodes of the KV store, as kv://HOST:PORT or kvs://HOST:PORT.",
    )
    ttl_s: float = Field(
        default=15.0,
        ge=0.5,
        le=MAX_TTL_S,
        description="How long an entry lives without renewal. While the engine's /health "
        "answers, or the node takes connections, the command renews the entry three times as "
        "often.",
        json_schema_extra={"flags": ["--ttl"]},
    )
    health_timeout_s: float = Field(
        default=5.0, gt=0, description="Longest time for the answer to a health check."
    )
    log_level: LogLevel = Field(
        default="info", description="Lowest severity that the command logs."
    )

    @model_validator(mode="after")
    def _something_to_do(self) -> RegisterSettings:
        if not self.redis.get_secret_value():
            raise ValueError("no Redis to register in: give --redis redis://HOST:PORT/DB")
        if not self.members:
            raise ValueError("nothing to register: give --decode URL, --prefill or --store")
        return self

    @property
    def members(self) -> Members:
        """The engines and store nodes, with their roles."""
        roles = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.STORE: self.store}
        return both_roles((address, role) for role, named in roles.items() for address in named)
