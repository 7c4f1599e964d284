"""Secrets that a setting takes from a file, as Kubernetes and Docker mount them.

Any user may be able to read the file: such mounts are readable to all, within the container.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import SecretStr

from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BYTES: Final = 1 << 16


def secret_of(
    given: SecretStr, path: str, flag: str, check: Callable[[str], str] = str
) -> SecretStr:
    """The secret of `flag`: as given, or read now from the file of `flag`-file, without newlines.

    Raises:
        ValueError: both are given, or the file cannot be used, or `check` refuses its secret; a
            sentence without the secret.
    """
    if not path:
        return given
    if given.get_secret_value():
        raise ValueError(f"{flag} and {flag}-file are both given; leave one out")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        secret = content.decode("utf-8").rstrip("\r\n")
    except OSError as error:
        raise ValueError(f"{flag}-file {path}: {reason_of(error)}; give a readable file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag}-file {path} is not UTF-8; write the secret as text") from None
    if not secret or "\n" in secret or len(content) > MAX_BYTES:
        raise ValueError(f"{flag}-file {path}: write the secret into it, on the only line")
    try:
        return SecretStr(check(secret))
    except ValueError as error:
        raise ValueError(f"{flag}-file {path}: {error}") from None
