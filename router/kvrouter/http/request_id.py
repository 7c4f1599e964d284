"""The id of a request: the client's own, or a new one."""

from __future__ import annotations

import re
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIds:
    """Mints ids that no other router mints."""

    def __init__(self) -> None:
        self._prefix = token_hex(8)
        self._numbers = count(1)

    def of(self, headers: Mapping[str, str]) -> str:
        """The client's own `x-request-id` if it is sane, else a new one."""
        given = headers.get("x-request-id")
        if given is not None and _SANE_ID.fullmatch(given):
            return given
        return f"{self._prefix}-{next(self._numbers):x}"
