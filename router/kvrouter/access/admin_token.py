"""The token that /workers and the status document require."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrouter.errors import ApiError
from kvrouter_store.connection.tokens import bearer_token

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class AdminToken:
    """The token as it is now; "" requires none."""

    value: str = ""

    def ask(self, headers: Mapping[str, str]) -> None:
        """Check the token of a request, in constant time. ApiError: 401."""
        given = bearer_token(headers.get("authorization", "")).encode("latin-1", "replace")
        if self.value and not hmac.compare_digest(given, self.value.encode()):
            raise ApiError(401, "This needs the admin token, as Authorization: Bearer TOKEN.")
