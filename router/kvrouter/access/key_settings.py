"""Settings of `kvrouter key new`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvrouter.credentials.caller_keys import NAME


class KeySettings(BaseModel):
    """The key to make."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    env_prefix: ClassVar[str] = "KVROUTER_KEY_"

    name: str = Field(
        description="Name of the caller, as logs and metrics show it: 1 to 64 letters, digits and "
        ". _ @ -.",
        json_schema_extra={"positional": True, "metavar": "NAME"},
    )
    file: str = Field(
        default="",
        description="File of --api-key-file, to which the command adds the name and the SHA-256 "
        "of the key. By default it prints this line after the key.",
        json_schema_extra={"section": "Settings"},
    )

    @field_validator("name")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(f"{value!r}: a name has 1 to 64 letters, digits and . _ @ -")
        return value
