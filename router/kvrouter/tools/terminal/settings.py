"""Settings of `kvrouter status`."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from kvrouter.options.settings import Settings


class StatusSettings(Settings):
    """Which router to show, and how."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_STATUS_", frozen=True)

    url: str = Field(
        default="http://127.0.0.1:8001",
        description="URL of the router's control port.",
        json_schema_extra={"section": "Settings", "positional": True},
    )
    once: bool = Field(default=False, description="Print the present state once, and exit.")
    json_lines: bool = Field(
        default=False,
        description="Print the state as JSON, one line each time, instead of tables.",
        json_schema_extra={"flags": ["--json"]},
    )
    interval_s: float = Field(
        default=1.0,
        ge=0.1,
        le=3600,
        description="Time between two updates.",
    )
    timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Longest time for the router's answer.",
    )
    token: SecretStr = Field(
        default=SecretStr(""),
        description="The router's admin token, if it needs one. Give it in the environment: other "
        "users can see flags.",
    )
    ca_file: str = Field(
        default="", description="PEM file of the CA that signed the control port's certificate."
    )
    color: Literal["auto", "always", "never"] = Field(
        default="auto", description="Colours. auto: on a terminal, unless NO_COLOR is set."
    )

    @field_validator("url")
    @classmethod
    def _url_of_a_router(cls, value: str) -> str:
        url = value.rstrip("/") if "://" in value else f"http://{value.rstrip('/')}"
        if not url.startswith(("http://", "https://")) or len(url.partition("://")[2]) < 1:
            raise ValueError(f"url {value!r}: give it as http://HOST:PORT of the control port")
        return url


def colours_wanted(settings: StatusSettings, terminal: bool) -> bool:
    """Whether to colour the output, which goes to a terminal or elsewhere."""
    if settings.color == "auto":
        return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return settings.color == "always"
