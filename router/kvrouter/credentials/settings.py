"""Settings of how the router trusts engines, and of the keys that it shows them."""

from __future__ import annotations

from pydantic import BaseModel, Field, field_validator

from kvrouter.credentials.tls import client_context


class EngineTrustSettings(BaseModel):
    """Whom to trust among engines."""

    engine_ca_file: str = Field(
        default="",
        description="PEM file of the CAs that have signed the certificates of engines at https:// "
        "addresses. By default those that this machine trusts.",
    )

    @field_validator("engine_ca_file")
    @classmethod
    def _authorities(cls, value: str) -> str:
        if value:
            client_context(value)
        return value
