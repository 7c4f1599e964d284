"""Settings of what several routers share over Redis."""

from __future__ import annotations

import re

from pydantic import BaseModel, Field, SecretStr, field_validator

from kvrouter.redis.connection import checked


class RedisSettings(BaseModel):
    """Where Redis is, and under which names this group of routers keeps what is its own there."""

    redis: SecretStr = Field(
        default=SecretStr(""),
        description="Redis over which several routers share engines, load and what "
        "they believe engines to hold, as redis://[:PASSWORD@]HOST:PORT/DB, or rediss:// for TLS "
        "(?ssl_ca_certs=FILE names the "
        "CA). Without it this router is alone. A URL with a password is better given in the "
        "environment than as a flag, which others can see.",
    )
    redis_prefix: str = Field(
        default="kvrouter",
        description="Begins every key and channel in Redis; routers of one group have the same, "
        "other groups in the same Redis another.",
    )

    @field_validator("redis")
    @classmethod
    def _redis_url(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value():
            checked(value.get_secret_value())
        return value

    @field_validator("redis_prefix")
    @classmethod
    def _plain_prefix(cls, value: str) -> str:
        if re.fullmatch(r"[\w.{}-]{1,64}", value) is None:
            raise ValueError("give up to 64 letters, digits and any of . _ - { }")
        return value
