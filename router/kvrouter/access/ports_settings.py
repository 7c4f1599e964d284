"""Settings of the ports: TLS, and a port of its own for administration and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, model_validator

from kvrouter.credentials.tls import server_context

if TYPE_CHECKING:
    import ssl


class PortSettings(BaseModel):
    """What the router's ports show, and what is served on which."""

    control_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of its own for /workers and /metrics, which are then not on --port, and "
        "for the status page; 0 takes a free one. Health is told on both.",
    )
    control_host: str = Field(
        default="127.0.0.1", description="Address on which --control-port listens."
    )
    ssl_certfile: str = Field(
        default="",
        description="PEM file of the certificate, and its chain, that the ports show: then they "
        "speak HTTPS. Read again on SIGHUP.",
    )
    ssl_keyfile: str = Field(
        default="",
        description="PEM file of its key, without a passphrase; others must not be able to read "
        "it. By default the key stands in --ssl-certfile.",
    )
    ssl_ca_certs: str = Field(
        default="",
        description="PEM file of CAs: only clients that show a certificate of one of them are "
        "served, on both ports.",
    )

    @model_validator(mode="after")
    def _certificates_that_can_be_used(self) -> PortSettings:
        self.port_tls()
        return self

    def port_tls(self) -> ssl.SSLContext | None:
        """What the ports show, as the files stand now; None where they are plain.

        Raises:
            ValueError: a file cannot be used, or one is missing; a sentence.
        """
        if not self.ssl_certfile:
            if self.ssl_keyfile or self.ssl_ca_certs:
                raise ValueError("--ssl-keyfile and --ssl-ca-certs go with --ssl-certfile FILE")
            return None
        try:
            return server_context(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        except ValueError as error:
            raise ValueError(f"--ssl-certfile, --ssl-keyfile, --ssl-ca-certs: {error}") from None

    @property
    def admin_host(self) -> str | None:
        """Where /workers is to be reached, if it is on a port of its own."""
        return self.control_host if self.control_port is not None else None
