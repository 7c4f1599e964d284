"""Settings of who may call: keys of callers, keys that engines are shown."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from kvrouter.credentials.caller_keys import Key, check_key, joined, plain_keys, read_keys
from kvrouter.credentials.engine_keys import by_engine, read_worker_keys
from kvrouter.credentials.settings import EngineTrustSettings


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


Secrets = Annotated[list[SecretStr], NoDecode, BeforeValidator(_secrets)]


class AccessSettings(EngineTrustSettings):
    """Who may call, and what the router shows to engines."""

    api_key: Secrets = Field(
        default_factory=list,
        description="Keys of which callers must bring one, as Authorization: Bearer; better given "
        "in the environment than as a flag, which others can see. Limits are for keys of "
        "--api-key-file.",
    )
    api_key_file: str = Field(
        default="",
        description="YAML file of the callers' names and the SHA-256 of their keys, with models "
        "and rates where they are limited; read again on SIGHUP. kvrouter key new NAME makes a "
        "key.",
    )
    worker_api_key: Secrets = Field(
        default_factory=list,
        description="Key that engines are shown, as KEY for all or HOST:PORT=KEY for one, in place "
        "of the client's Authorization; better given in the environment or by "
        "--worker-api-key-file.",
    )
    worker_api_key_file: str = Field(
        default="",
        description="File of such keys, one on each line; read again on SIGHUP. Others must not be "
        "able to read it.",
    )

    @model_validator(mode="after")
    def _keys_that_can_be_used(self) -> AccessSettings:
        self.caller_keys()
        self.engine_keys()
        return self

    def caller_keys(self) -> list[Key]:
        """The callers' keys as they stand now; none where nobody is asked for one.

        Raises:
            ValueError: they cannot be used; says why in a sentence, and repeats no key.
        """
        try:
            given = [check_key(key.get_secret_value()) for key in self.api_key]
        except ValueError as error:
            raise ValueError(f"--api-key: {error}") from None
        try:
            listed = read_keys(self.api_key_file) if self.api_key_file else []
            return joined([*plain_keys(list(dict.fromkeys(given))), *listed])
        except ValueError as error:
            raise ValueError(f"--api-key-file {error}") from None

    def engine_keys(self) -> dict[str, str]:
        """The engines' keys as they stand now, by `HOST:PORT`; under "" that of all others.

        Raises:
            ValueError: as above.
        """
        try:
            given = by_engine(key.get_secret_value() for key in self.worker_api_key)
        except ValueError as error:
            raise ValueError(f"--worker-api-key: {error}") from None
        if not self.worker_api_key_file:
            return given
        try:
            return by_engine(read_worker_keys(self.worker_api_key_file)) | given
        except ValueError as error:
            raise ValueError(f"--worker-api-key-file {error}") from None
