"""Engines named by the router's own settings: --prefill and --decode, read anew on SIGHUP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrouter.membership.discovery.base import Listener, Members


class FlagsSource:
    """Says what it was told to say, at once. It cannot fail.

    Args:
        members: to begin with.
    """

    def __init__(self, members: Members) -> None:
        self.name = "flags"
        self._members = members
        self._listener: Listener | None = None

    def say(self, members: Members) -> None:
        """From now on these are the engines. An operator said so: all of them are to be there."""
        self._members = members
        if self._listener is not None:
            self._listener.named(members, anew=True)

    async def follow(self, listener: Listener) -> None:
        """See `Source`."""
        self._listener = listener
        listener.named(self._members)
        try:
            await asyncio.Event().wait()  # flags change by `say` alone
        finally:
            self._listener = None
