"""Engines of the router's own settings, --prefill and --decode, which SIGHUP reads again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrouter.membership.discovery.base import Listener, Members


class FlagsSource:
    """Names the members that it was given. It cannot fail."""

    def __init__(self, members: Members) -> None:
        self.name = "flags"
        self._members = members
        self._listener: Listener | None = None

    def set(self, members: Members) -> None:
        """Name these engines from now on; those removed by other means come back."""
        self._members = members
        if self._listener is not None:
            self._listener.named(members, restore=True)

    async def follow(self, listener: Listener) -> None:
        """See `EngineSource`."""
        self._listener = listener
        listener.named(self._members)
        try:
            await asyncio.Event().wait()  # only `set` changes them
        finally:
            self._listener = None
