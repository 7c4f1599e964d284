"""Settings of the Redis through which several routers share state."""

from __future__ import annotations

import re

from pydantic import BaseModel, Field, SecretStr, field_validator

from kvrouter.redis.client import checked


class RedisSettings(BaseModel):
    """Where Redis is, and the prefix of this group of routers."""

    redis: SecretStr = Field(
        default=SecretStr(""),
        description="Redis through which several routers share engines, load and the blocks that "
        "engines hold: redis://[:PASSWORD@]HOST:PORT/DB, or rediss:// for TLS "
        "(?ssl_ca_certs=FILE names the CA). Give a URL with a password in the environment: other "
        "users can see flags.",
        json_schema_extra={"section": "Several routers", "metavar": "URL"},
    )
    redis_prefix: str = Field(
        default="kvrouter",
        description="Prefix of every key and channel in Redis. Routers of one group need the same "
        "prefix, and groups in the same Redis need different ones.",
        json_schema_extra={"metavar": "PREFIX"},
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
