"""The token that /workers and the status document require."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from kvrouter.errors import ApiError
from kvrouter_store.connection.tokens import bearer_token

if TYPE_CHECKING:
    from collections.abc import Mapping


def ask_for_token(headers: Mapping[str, str], token: str) -> None:
    """Check the token of a request, in constant time; "" needs none. ApiError: 401."""
    given = bearer_token(headers.get("authorization", "")).encode("latin-1", "replace")
    if token and not hmac.compare_digest(given, token.encode()):
        raise ApiError(401, "This needs the admin token, as Authorization: Bearer TOKEN.")
