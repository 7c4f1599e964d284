"""Settings of the Redis through which several routers share state."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from kvrouter.options.secret_file import secret_of
from kvrouter.redis.client import checked, with_password


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
    redis_password_file: str = Field(
        default="",
        description="File that holds the password of --redis, whose URL then has none.",
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

    @model_validator(mode="after")
    def _redis_password(self) -> RedisSettings:
        if self.redis_password_file:
            url, path = self.redis.get_secret_value(), self.redis_password_file
            if not url or urlsplit(url).password:
                raise ValueError("--redis-password-file needs a --redis URL without a password")
            password = secret_of(SecretStr(""), path, "--redis-password").get_secret_value()
            self.redis = SecretStr(with_password(url, password))
        return self

    @field_validator("redis_prefix")
    @classmethod
    def _plain_prefix(cls, value: str) -> str:
        if re.fullmatch(r"[\w.{}-]{1,64}", value) is None:
            raise ValueError("give up to 64 letters, digits and any of . _ - { }")
        return value
