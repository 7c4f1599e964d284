"""Settings of `kvrouter status`: flags > environment (KVROUTER_STATUS_*) > YAML file > defaults."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["StatusSettings", "colours_wanted"]


class StatusSettings(BaseSettings):
    """The router to ask, and how to print its status."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_STATUS_", extra="forbid", frozen=True)

    url: str = Field(
        default="http://127.0.0.1:8001",
        description="URL of the router's control port; also taken without the flag's name",
        json_schema_extra={"positional": True},
    )
    once: bool = Field(default=False, description="print what is now, and end")
    json_lines: bool = Field(
        default=False,
        description="print the document itself, one line each time, in place of tables",
        json_schema_extra={"flags": ["--json"]},
    )
    interval_s: float = Field(
        default=1.0,
        ge=0.1,
        le=3600,
        description="seconds between two looks",
        json_schema_extra={"flags": ["--interval"]},
    )
    timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="seconds that the router may take to answer",
        json_schema_extra={"flags": ["--timeout"]},
    )
    token: SecretStr = Field(
        default=SecretStr(""),
        description="the router's admin token, where it asks for one; better given in the "
        "environment than as a flag, which others can see",
    )
    ca_file: str = Field(
        default="", description="PEM file of who signed the control port's certificate"
    )
    color: Literal["auto", "always", "never"] = Field(
        default="auto", description="colours; auto: on a terminal, where NO_COLOR is not set"
    )

    @field_validator("url")
    @classmethod
    def _url_of_a_router(cls, value: str) -> str:
        url = value.rstrip("/") if "://" in value else f"http://{value.rstrip('/')}"
        if not url.startswith(("http://", "https://")) or len(url.partition("://")[2]) < 1:
            raise ValueError(f"url {value!r}: give it as http://HOST:PORT of the control port")
        return url


def colours_wanted(settings: StatusSettings, terminal: bool) -> bool:
    """Whether to colour the output, which is a `terminal` or not."""
    if settings.color == "auto":
        return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return settings.color == "always"
