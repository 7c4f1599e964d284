"""Settings of how the router trusts engines."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from kvrouter.credentials.tls import Trust, client_context, read_certificate
from kvrouter.options.complaints import about
from kvrouter.options.types import checked


class EngineTrustSettings(BaseModel):
    """Which certificates of engines to trust, and which one to show them."""

    engine_ca_file: Annotated[str, checked(client_context)] = Field(
        default="",
        description="PEM file of the CAs that signed the certificates of engines at https:// "
        "addresses. By default the router trusts the CAs of this machine.",
        json_schema_extra={"section": "Authentication"},
    )
    engine_cert_file: str = Field(
        default="",
        description="PEM file of the certificate and its chain that the router shows to engines "
        "at https:// addresses that ask for one.",
    )
    engine_key_file: str = Field(
        default="",
        description="PEM file of that certificate's key, without a passphrase; other users must "
        "not be able to read it. By default the key is in --engine-cert-file.",
    )

    @model_validator(mode="after")
    def _usable_certificate(self) -> EngineTrustSettings:
        self.engine_certificate()
        return self

    def engine_certificate(self) -> bytes:
        """What engines are shown, from the files as they are now; b"": nothing.

        ValueError: a file cannot be used, or one is missing; a sentence.
        """
        if not self.engine_cert_file:
            if self.engine_key_file:
                raise ValueError("--engine-key-file needs --engine-cert-file FILE")
            return b""
        with about("--engine-cert-file, --engine-key-file:"):
            return read_certificate(self.engine_cert_file, self.engine_key_file)

    def engine_trust(self) -> Trust:
        """What connections to engines need."""
        return Trust(self.engine_ca_file, self.engine_certificate())
