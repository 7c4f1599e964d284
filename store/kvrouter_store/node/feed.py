"""The node's feed of what it holds: taken once, and handed to all that follow it."""

import asyncio
import select
from collections.abc import Sequence
from typing import Protocol

from kvrouter_store._core import BlockChange, StoreServer

MOST_CHANGES = 1 << 16
"""Changes that may wait for a follower; further ones are lost to it."""
GATHER_S = 0.01
"""Changes that come within this time are taken together."""


class Follower(Protocol):
    """Someone who wants to know of every change. Never blocks and never raises."""

    def take(self, changes: Sequence[BlockChange], *, lost: bool, more: bool) -> None:
        """The next changes. Of one name, each call has one state per manifest at most.

        lost: some before these were lost. more: more can be taken already.
        """


class FeedReader:
    """Takes the changes of a node that runs. `run` belongs to one loop."""

    def __init__(self, server: StoreServer) -> None:
        self.followers: list[Follower] = []
        self._server = server
        self._descriptor = server.offer_feed(MOST_CHANGES)

    async def run(self) -> None:
        """Hand changes on until cancelled."""
        poll, more = select.poll(), False
        poll.register(self._descriptor, select.POLLIN)
        while True:
            await readable(self._descriptor)
            await asyncio.sleep(0 if more else GATHER_S)
            changes, lost = self._server.take_feed()
            more = bool(poll.poll(0))
            for each in self.followers:
                each.take(changes, lost=lost, more=more)


async def readable(descriptor: int) -> None:
    """Wait until there is something to read."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
