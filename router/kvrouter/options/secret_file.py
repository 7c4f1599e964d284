"""Secrets that a setting takes from a file, as Kubernetes and Docker mount them.

Any user may be able to read the file: such mounts are readable to all, within the container.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import SecretStr

from kvrouter_store.connection.tokens import check_token
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BYTES: Final = 1 << 16
_FORM: Final = "write the secret into it, on the only line"


def only_line(text: str) -> str:
    """The secret of a file that holds nothing else. ValueError: a sentence without it."""
    secret = text.rstrip("\r\n")
    if not secret or "\n" in secret:
        raise ValueError(_FORM)
    return secret


def read_store_token(text: str) -> str:
    """The token of a file that holds it alone, or of a node's file (TENANT:TOKEN) of one tenant.

    ValueError: a sentence without it.
    """
    stripped = (line.strip() for line in text.splitlines())
    lines = [line for line in stripped if line and not line.startswith("#")]
    if len(lines) > 1:
        raise ValueError("it has several tokens; give a file with the token of one tenant")
    token = lines[0].rpartition(":")[2] if lines else ""
    if not token:
        raise ValueError(_FORM)
    return check_token(token)


def secret_of(
    given: SecretStr, path: str, flag: str, read: Callable[[str], str] = only_line
) -> SecretStr:
    """The secret of `flag`: as given, or what `read` makes of the text in the file of `flag`-file.

    Raises:
        ValueError: both are given, or the file cannot be used, or `read` refuses it; a sentence
            without the secret.
    """
    if not path:
        return given
    if given.get_secret_value():
        raise ValueError(f"{flag} and {flag}-file are both given; leave one out")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise ValueError(f"{flag}-file {path}: {reason_of(error)}; give a readable file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag}-file {path} is not UTF-8; write the secret as text") from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"{flag}-file {path}: {_FORM}")
    try:
        return SecretStr(read(text))
    except ValueError as error:
        raise ValueError(f"{flag}-file {path}: {error}") from None
