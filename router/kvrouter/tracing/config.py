"""What OpenTelemetry has a program that exports traces read of the environment.

https://opentelemetry.io/docs/specs/otel/protocol/exporter/. Its SDK reads the rest itself
(OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES), and `requests` proxies and REQUESTS_CA_BUNDLE.
"""

from __future__ import annotations

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def _names(name: str) -> AliasChoices:
    """The variable for traces, and the one for every signal; the former wins."""
    return AliasChoices(f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}")


class OtlpSettings(BaseSettings):
    """As they are written there; what is empty is not there.

    Attributes:
        headers: that a collector wants, as `name=value,name=value`, percent-encoded.
        timeout: seconds that it may take for a batch.
        compression: gzip, deflate or none.
        certificate: file of the authorities that vouch for it.
        client_certificate: file of the certificate that is shown to it.
        client_key: file of its key.
    """

    model_config = SettingsConfigDict(env_ignore_empty=True)

    headers: str = Field(default="", validation_alias=_names("HEADERS"))
    timeout: str = Field(default="10", validation_alias=_names("TIMEOUT"))
    compression: str = Field(default="none", validation_alias=_names("COMPRESSION"))
    certificate: str | None = Field(default=None, validation_alias=_names("CERTIFICATE"))
    client_certificate: str | None = Field(
        default=None, validation_alias=_names("CLIENT_CERTIFICATE")
    )
    client_key: str | None = Field(default=None, validation_alias=_names("CLIENT_KEY"))
