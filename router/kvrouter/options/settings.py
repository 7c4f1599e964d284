"""The base class of the settings of a command, and settings that several commands have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvrouter.options.secret_file import read_store_token, secret_of
from kvrouter_store.connection.tls import ClientTls
from kvrouter_store.node.settings import (  # noqa: TC001 (pydantic reads them)
    StoreCaFile,
    StoreCertFile,
    StoreKeyFile,
    StoreToken,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class Settings(BaseSettings):
    """Settings of one command; `env_prefix` in its configuration begins its variables.

    A model that is made directly has its arguments and defaults only. `load.load` reads flags,
    the environment and the YAML file.
    """

    model_config = SettingsConfigDict(
        extra="forbid", validate_default=True, enable_decoding=False, protected_namespaces=()
    )
    # What to do in place of flags that earlier versions had, by the flag.
    removed: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: Any,
        **others: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take the arguments of the constructor, and nothing else."""
        return (init_settings,)


class StoreAccess(BaseModel):
    """What a client shows to nodes of the store, and whom it trusts."""

    store_token: StoreToken = Field(
        default=SecretStr(""),
        description="Token of the store, if it needs one. Give it in the environment: other users "
        "can see flags.",
        json_schema_extra={"section": "KV store"},
    )
    store_token_file: str = Field(
        default="",
        description="File that holds the token of the store, in place of --store-token. A node's "
        "--token-file will do if it has one tenant.",
    )
    store_ca_file: StoreCaFile = ""
    store_cert_file: StoreCertFile = ""
    store_key_file: StoreKeyFile = ""

    @model_validator(mode="after")
    def _token_of_a_file(self) -> Self:
        given, path = self.store_token, self.store_token_file
        token = secret_of(given, path, "--store-token", read_store_token)
        object.__setattr__(self, "store_token", token)  # of a simulator it is frozen
        return self

    @property
    def store_tls(self) -> ClientTls:
        """Files for TLS with the store."""
        return ClientTls(self.store_ca_file, self.store_cert_file, self.store_key_file)
