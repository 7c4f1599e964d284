"""Settings of API keys, of callers and for engines, and of the ports: TLS, a control port.

`--host` and `--port` are in `app/settings.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SecretStr, model_validator

from kvrouter.credentials.caller_keys import Key, check_key, joined, plain_keys, read_keys
from kvrouter.credentials.engine_keys import by_engine, read_worker_keys
from kvrouter.credentials.settings import EngineTrustSettings
from kvrouter.credentials.tls import server_context
from kvrouter.http.server.cors import read_origins
from kvrouter.options.complaints import about
from kvrouter.options.types import Port, Texts  # noqa: TC001 (pydantic reads them)

if TYPE_CHECKING:
    import ssl


def _secrets(value: Any) -> list[SecretStr]:
    """A list of secrets may be written `a,b` or `a b` (environment), or as a list.

    ValueError: one is no text; the message does not repeat it.
    """
    items = value if isinstance(value, list) else [value]
    found: list[SecretStr] = []
    for item in items:
        if isinstance(item, SecretStr):
            found.append(item)
        elif isinstance(item, str):
            found += [SecretStr(part) for part in item.replace(",", " ").split()]
        else:
            raise ValueError("a key is a text: put it between quotes")
    return found


Secrets = Annotated[list[SecretStr], BeforeValidator(_secrets)]


class AccessSettings(EngineTrustSettings):
    """Keys of callers and of engines."""

    api_key: Secrets = Field(
        default_factory=list,
        description="API keys; every client must then bring one of them, as Authorization: "
        "Bearer. Give them in the environment: other users can see flags. Only keys of "
        "--api-key-file have limits.",
        json_schema_extra={"section": "Authentication"},
    )
    api_key_file: str = Field(
        default="",
        description="YAML file of callers: their names, the SHA-256 of their keys, and optional "
        "models and rates. `kvrouter key new NAME` makes a key. The router reads the file again "
        "on SIGHUP.",
    )
    salt_from_key: bool = Field(
        default=False,
        description="Keep the KV of tenants apart: each prompt gets a `cache_salt` of its key's "
        "name, or of its tenant by --trusted-proxies. No client then learns by a short time to "
        "the first token what another one has asked. Prompts that tenants have in common are "
        "computed, and stored, once for each.",
    )
    worker_api_key: Secrets = Field(
        default_factory=list,
        description="Key that the router sends to engines in place of the client's Authorization: "
        "KEY for all engines or HOST:PORT=KEY for one. Give it in the environment or by "
        "--worker-api-key-file: other users can see flags.",
    )
    worker_api_key_file: str = Field(
        default="",
        description="File of such keys, one per line; other users must not be able to read it. "
        "The router reads it again on SIGHUP.",
    )

    cors_allow_origin: Annotated[Texts, AfterValidator(read_origins)] = Field(
        default_factory=list,
        description="Origins of web pages that may use this router from a browser, as "
        "https://chat.example.com, or * for all. By default browsers keep answers from pages of "
        "other origins. /workers is for no page.",
        json_schema_extra={
            "flags": ["--allowed-origins", "--cors-allowed-origins"],
            "metavar": "ORIGIN",
        },
    )

    @model_validator(mode="after")
    def _usable_keys(self) -> AccessSettings:
        self.caller_keys()
        self.engine_keys()
        return self

    def caller_keys(self) -> list[Key]:
        """The callers' keys, from the files as they are now; none if callers need no key.

        ValueError: they cannot be used; says why in a sentence, and repeats no key.
        """
        with about("--api-key:"):
            given = [check_key(key.get_secret_value()) for key in self.api_key]
        with about("--api-key-file"):
            listed = read_keys(self.api_key_file) if self.api_key_file else []
            return joined([*plain_keys(list(dict.fromkeys(given))), *listed])

    def engine_keys(self) -> dict[str, str]:
        """The engines' keys, read now, by `HOST:PORT`; under "" that of all others.

        ValueError: as above.
        """
        with about("--worker-api-key:"):
            given = by_engine(key.get_secret_value() for key in self.worker_api_key)
        if not self.worker_api_key_file:
            return given
        with about("--worker-api-key-file"):
            return by_engine(read_worker_keys(self.worker_api_key_file)) | given


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

        ValueError: a file cannot be used, or one is missing; a sentence.
        """
        if not self.ssl_certfile:
            if self.ssl_keyfile or self.ssl_ca_certs:
                raise ValueError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile FILE")
            return None
        with about("--ssl-certfile, --ssl-keyfile, --ssl-ca-certs:"):
            return server_context(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
