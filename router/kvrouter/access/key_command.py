"""`kvrouter key new NAME`: makes a key, prints it once, and keeps only its hash."""

from __future__ import annotations

import os

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from kvrouter.credentials.caller_keys import NAME, file_line, new_key, read_keys
from kvrouter.options.complaints import UsageError
from kvrouter.options.settings import Settings


class KeySettings(Settings):
    """The key to make."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_KEY_", frozen=True)

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


def run(settings: KeySettings) -> None:
    """Make a key. UsageError: the file cannot be used, or has a key of that name."""
    key = new_key()
    line = file_line(settings.name, key)
    if not settings.file:
        print(key, line, sep="\n")
        return
    try:
        _add(settings.file, settings.name, line)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(
            f"{settings.file}: {error.strerror}; give a file that can be written"
        ) from None
    print(key)


def _add(path: str, name: str, line: str) -> None:
    """Add a line to the file, which is created if it does not exist.

    ValueError: the file cannot be used, or has that name already. OSError: it cannot be written.
    """
    try:
        there = os.stat(path).st_size > 0
    except FileNotFoundError:
        there = False
    if there and any(key.name == name for key in read_keys(path)):
        raise ValueError(f"{path} has {name!r} already; take another name, or remove that entry")
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        ended = not size or os.pread(descriptor, 1, size - 1) == b"\n"
        file.write(f"{'' if ended else chr(10)}{line}\n".encode())
