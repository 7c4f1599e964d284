"""Settings of how the router trusts engines."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from kvrouter.credentials.tls import client_context
from kvrouter.options.types import checked


class EngineTrustSettings(BaseModel):
    """Which certificates of engines to trust."""

    engine_ca_file: Annotated[str, checked(client_context)] = Field(
        default="",
        description="PEM file of the CAs that signed the certificates of engines at https:// "
        "addresses. By default the router trusts the CAs of this machine.",
        json_schema_extra={"section": "Authentication"},
    )
