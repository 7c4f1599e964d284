"""Settings of API keys: those of callers, and those that the router sends to engines."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from kvrouter.credentials.caller_keys import Key, check_key, joined, plain_keys, read_keys
from kvrouter.credentials.engine_keys import by_engine, read_worker_keys
from kvrouter.credentials.settings import EngineTrustSettings
from kvrouter.http.server.cors import read_origins
from kvrouter.options.complaints import about
from kvrouter.options.types import Texts  # noqa: TC001 (pydantic reads it)


def _secrets(value: Any) -> list[SecretStr]:
    """A list of secrets may be written `a,b` or `a b` (environment), or as a list.

    Raises:
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

        Raises:
            ValueError: they cannot be used; says why in a sentence, and repeats no key.
        """
        with about("--api-key:"):
            given = [check_key(key.get_secret_value()) for key in self.api_key]
        with about("--api-key-file"):
            listed = read_keys(self.api_key_file) if self.api_key_file else []
            return joined([*plain_keys(list(dict.fromkeys(given))), *listed])

    def engine_keys(self) -> dict[str, str]:
        """The engines' keys, read now, by `HOST:PORT`; under "" that of all others.

        Raises:
            ValueError: as above.
        """
        with about("--worker-api-key:"):
            given = by_engine(key.get_secret_value() for key in self.worker_api_key)
        if not self.worker_api_key_file:
            return given
        with about("--worker-api-key-file"):
            return by_engine(read_worker_keys(self.worker_api_key_file)) | given
