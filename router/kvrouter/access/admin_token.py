"""The token that /workers and the status document ask for, and whether a request brings it."""

from __future__ import annotations

import hmac
from typing import Final

from kvstore.credentials import bearer_token

TOKEN_NEEDED: Final = "This needs the admin token, as Authorization: Bearer TOKEN."


def shows_token(authorization: str, token: str) -> bool:
    """Whether this Authorization header brings the token.

    How long it takes tells nothing of the token but its length.
    """
    given = bearer_token(authorization).encode("latin-1", "replace")
    return hmac.compare_digest(given, token.encode())
