"""Settings of the ports: TLS, a control port. `--host` and `--port` are in `app/settings.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, model_validator

from kvrouter.credentials.tls import server_context
from kvrouter.options.complaints import about
from kvrouter.options.types import Port  # noqa: TC001 (pydantic reads it)

if TYPE_CHECKING:
    import ssl


class PortSettings(BaseModel):
    """The certificate of the ports, and the control port."""

    control_port: Port | None = Field(
        default=None,
        description="Serve /workers, /metrics and the status page on this port instead of --port; "
        "0 takes a free one. Both ports serve /health.",
        json_schema_extra={"section": "Ports and TLS"},
    )
    control_host: str = Field(default="127.0.0.1", description="Address of --control-port.")
    ssl_certfile: str = Field(
        default="",
        description="PEM file of the certificate and its chain. With it the ports speak HTTPS. "
        "The router reads it again on SIGHUP.",
    )
    ssl_keyfile: str = Field(
        default="",
        description="PEM file of the certificate's key, without a passphrase; other users must "
        "not be able to read it. By default the key is in --ssl-certfile.",
    )
    ssl_ca_certs: str = Field(
        default="",
        description="PEM file of CAs. With it, both ports serve only clients that show a "
        "certificate of one of them.",
        json_schema_extra={"metavar": "FILE"},
    )

    @model_validator(mode="after")
    def _usable_certificates(self) -> PortSettings:
        self.port_tls()
        return self

    def port_tls(self) -> ssl.SSLContext | None:
        """The TLS of the ports, from the files as they are now; None for plain ports.

        Raises:
            ValueError: a file cannot be used, or one is missing; a sentence.
        """
        if not self.ssl_certfile:
            if self.ssl_keyfile or self.ssl_ca_certs:
                raise ValueError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile FILE")
            return None
        with about("--ssl-certfile, --ssl-keyfile, --ssl-ca-certs:"):
            return server_context(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
