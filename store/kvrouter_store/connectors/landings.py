"""Landings that an engine awaits: one thread, and one connection to each node for all requests.

A node pushes the news of each block that came. When it is away, every wait ends at once: what is on
its way cannot arrive then. One that hangs is away when it owes an answer for the client's deadline.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.connectors.neighbours import Neighbours
from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from concurrent.futures import Future

FEW: Final = 8  # blocks that are asked for after one that landed
MOST: Final = 64  # in one question: many requests wait, and each may ask at the same time
BEAT_S: Final = 1.0  # between signs of life of a node at which something is awaited


class AwaitedPrefix:
    """Blocks of one request that are, or will be, in a node of the store. Read in any thread.

    hashes: the awaited blocks, in the order of their chain, 32 bytes each.
    landed: leading ones of them that are there, as far as the node has reported; only grows.
    found: where others are that were there already.
    over: no more news will come: all have landed, the time is up, or the node is away.
    """

    def __init__(self, hashes: bytes) -> None:
        self.hashes = hashes
        self.landed = 0
        self.found: frozenset[int] = frozenset()
        self.over = False
        self.wait: Future[None] | None = None

    @property
    def blocks(self) -> int:
        """Blocks that are awaited."""
        return len(self.hashes) // HASH_BYTES

    def rest(self, most: int) -> bytes:
        """At most so many of the hashes that are still awaited, the next one first."""
        begin = self.landed * HASH_BYTES
        return self.hashes[begin : begin + most * HASH_BYTES]

    def came(self, place: int) -> bool | None:
        """Whether the block at this place is there; None: it may yet come."""
        over = self.over  # read first: news of earlier landings has come by then
        return self.landed > place or place in self.found or (False if over else None)

    def drop(self) -> None:
        """Give the wait up, at the store too. Idempotent."""
        if self.wait is not None:
            self.wait.cancel()


@dataclass(eq=False)
class Landings:
    """Follows landings. Thread and connections begin with the first; `close` ends them.

    open_client: makes a node's client, in the thread's loop; this object owns it.
    news: is set whenever a block landed or a wait ended.
    """

    open_client: Callable[[str], AsyncStoreClient]
    news: threading.Event
    log: logging.Logger
    clock: Callable[[], float] = time.monotonic
    beat_s: float = BEAT_S

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._clients = Neighbours(self.open_client, self._end)
        self._ending: set[asyncio.Task[None]] = set()
        self._waits: Counter[AsyncStoreClient] = Counter()
        self._watches: dict[AsyncStoreClient, asyncio.Task[None]] = {}
        self._stop = asyncio.Event()
        self._closed = False

    def follow(
        self, manifest: Manifest, hashes: bytes, wait_s: float, node: str = ""
    ) -> AwaitedPrefix:
        """Follow consecutive blocks of a chain, at most `wait_s` seconds. Never blocks.

        With no time, any blocks of `hashes` that are there are found. node: '' is the own one.
        """
        coming = AwaitedPrefix(hashes)
        if self._closed:
            coming.over = True
            return coming
        following = self._follow(manifest, coming, self.clock() + wait_s, node)
        coming.wait = asyncio.run_coroutine_threadsafe(following, self._begun())
        return coming

    def close(self, deadline_s: float = 5.0) -> None:
        """End the waits, the connection and the thread. Idempotent."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        thread.join(deadline_s)

    def _begun(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, name="kvstore-landings", daemon=True)
            self._thread.start()
        return self._loop

    def _run(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        await self._stop.wait()
        waits = asyncio.all_tasks() - {asyncio.current_task()} - self._ending
        self._clients.close()
        await asyncio.gather(*self._ending, return_exceptions=True)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    def _end(self, client: AsyncStoreClient) -> None:
        ending = asyncio.create_task(client.close())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _follow(
        self, manifest: Manifest, coming: AwaitedPrefix, until: float, node: str
    ) -> None:
        try:
            with self._clients.client(node) as client:
                client.start()
                if not await client.reached():
                    self.log.debug("%s is away", client.url)
                elif until <= self.clock():
                    held = await client.held(manifest, coming.hashes)
                    coming.found = frozenset(place for place, there in enumerate(held) if there)
                else:
                    await self._watched(client, self._wait(client, manifest, coming, until))
        except KVStoreError as error:
            self.log.debug("a landing is awaited no longer: %s", error)
        except Exception:
            self.log.exception("a landing is awaited no longer")
        finally:
            coming.over = True
            self.news.set()

    async def _watched(self, client: AsyncStoreClient, waiting: Awaitable[None]) -> None:
        """Wait while the node gives signs of life: the answer to a wait may be long in coming."""
        self._waits[client] += 1
        if client not in self._watches:
            self._watches[client] = asyncio.create_task(self._watch(client))
        try:
            await waiting
        finally:
            self._waits[client] -= 1

    async def _watch(self, client: AsyncStoreClient) -> None:
        while self._waits[client]:
            await asyncio.sleep(self.beat_s)
            with contextlib.suppress(KVStoreError):  # a late answer ends the waits, too
                await client.stats()
        del self._waits[client], self._watches[client]

    async def _wait(
        self, client: AsyncStoreClient, manifest: Manifest, coming: AwaitedPrefix, until: float
    ) -> None:
        while coming.landed < coming.blocks and (left_s := until - self.clock()) > 0:
            landing = await client.wait(manifest, coming.rest(1), 1, left_s)
            if not landing.landed:
                break
            coming.landed += 1
            self.news.set()  # the node may ask its tiers before it tells what came with it
            await self._count_on(client, manifest, coming)

    async def _count_on(
        self, client: AsyncStoreClient, manifest: Manifest, coming: AwaitedPrefix
    ) -> None:
        """Count what landed with a block; a wait tells of that one alone."""
        most = FEW
        while some := coming.rest(most):
            held = await client.held(manifest, some)
            came = (*held, False).index(False)
            coming.landed += came
            if came:
                self.news.set()
            if came < len(held):
                break
            most = min(2 * most, MOST)
