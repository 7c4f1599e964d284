"""Settings of how the router trusts engines."""

from __future__ import annotations

from pydantic import BaseModel, Field, field_validator

from kvrouter.credentials.tls import client_context


class EngineTrustSettings(BaseModel):
    """Which certificates of engines to trust."""

    engine_ca_file: str = Field(
        default="",
        description="PEM file of the CAs that signed the certificates of engines at https:// "
        "addresses. By default the router trusts the CAs of this machine.",
        json_schema_extra={"section": "Authentication"},
    )

    @field_validator("engine_ca_file")
    @classmethod
    def _usable_authorities(cls, value: str) -> str:
        if value:
            client_context(value)
        return value
