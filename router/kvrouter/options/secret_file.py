"""Secrets that a setting takes from a file, as Kubernetes and Docker mount them.

Any user may be able to read the file: such mounts are readable to all, within the container.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import SecretStr

from kvrouter.options.complaints import about
from kvrouter_store.connection.tokens import check_token
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BYTES: Final = 4 << 20  # a file of keys may have thousands
_FORM: Final = "write the secret into it, on the only line"


def read_private(path: str, forbidden: int = 0, complaint: str = "") -> str:
    """The text of a file that has none of the `forbidden` permissions.

    ValueError: a sentence with the remedy; `complaint` for its permissions.
    """
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {reason_of(error)}; give a readable file") from None
    if mode & forbidden:
        raise ValueError(f"{path} {complaint} {path}")
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} is longer than {MAX_BYTES >> 20} MiB; give a smaller file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8; write it as UTF-8") from None


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

    ValueError: both are given, or the file cannot be used, or `read` refuses it; a sentence without
    the secret.
    """
    if not path:
        return given
    if given.get_secret_value():
        raise ValueError(f"{flag} and {flag}-file are both given; leave one out")
    with about(f"{flag}-file"):
        text = read_private(path)
    with about(f"{flag}-file {path}:"):
        return SecretStr(read(text))
