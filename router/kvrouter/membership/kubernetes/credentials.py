"""What the user of a kubeconfig shows to the API server: a header, a certificate, or both."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.membership.kubernetes.api import ApiFailed
from kvrouter.membership.kubernetes.kubeconfig import content_of, read_file

if TYPE_CHECKING:
    from pathlib import Path

    from kvrouter.membership.kubernetes.kubeconfig import User

_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What to show.

    Attributes:
        authorization: the header's value; "": no header.
        certificate: PEM of the client's certificate and its key; b"": none.
    """

    authorization: str = field(default="", repr=False)
    certificate: bytes = field(default=b"", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """Those of each request."""
        return {"authorization": self.authorization} if self.authorization else {}


def credentials_of(user: User, folder: Path) -> Credentials:
    """What the kubeconfig in `folder` tells itself, or names a file of. ApiFailed: see there."""
    if user.auth_provider is not None:
        raise ApiFailed("its user has an auth-provider, which is unknown: use an exec program")
    if user.impersonated is not None:
        raise ApiFailed("its user acts as another (`as`), which is unknown: leave it out")
    token = user.token
    if user.token_file:  # as in client-go, it wins
        content = read_file(folder / user.token_file, f"tokenFile {folder / user.token_file}")
        token = content.decode("utf-8", "replace")
    named = user.username or user.password
    if token and named:
        raise ApiFailed("its user has both a token and a password; leave one out")
    if named:
        pair = b64encode(f"{user.username}:{user.password}".encode()).decode()
        return Credentials(f"Basic {pair}", _certificate(user, folder))
    return Credentials(bearer(token) if token else "", _certificate(user, folder))


def bearer(token: str) -> str:
    """The header's value; ApiFailed: the token cannot stand in one."""
    stripped = token.strip()
    if not _TOKEN.fullmatch(stripped):
        raise ApiFailed("the token is not one line of ASCII")
    return f"Bearer {stripped}"


def with_key(certificate: bytes, key: bytes) -> bytes:
    """One PEM of both; ApiFailed: one is missing."""
    if bool(certificate) is not bool(key):
        raise ApiFailed("there is a client certificate without a key, or a key alone")
    # A kubelet keeps both in one file, which its kubeconfig names twice.
    return certificate if certificate == key else certificate + b"\n" + key


def _certificate(user: User, folder: Path) -> bytes:
    data, path = user.client_certificate_data, user.client_certificate
    certificate = content_of("client-certificate", data, folder, path)
    return with_key(
        certificate, content_of("client-key", user.client_key_data, folder, user.client_key)
    )
