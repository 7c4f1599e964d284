"""Landings that an engine awaits: one thread and one connection for any number of requests.

The store pushes the news of each block that came. When the store is away, every wait ends at once:
what is on its way cannot arrive then.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from concurrent.futures import Future

CONNECT_S = 2.0


class AwaitedPrefix:
    """Blocks of one request that are on their way into the store. Read in any thread.

    hashes: the awaited blocks, in the order of their chain, 32 bytes each.
    landed: leading ones of them that are there, as far as the store has reported; only grows.
    over: no more news will come: all have landed, the time is up, or the store is away.
    """

    def __init__(self, hashes: bytes) -> None:
        self.hashes = hashes
        self.landed = 0
        self.over = False
        self.wait: Future[None] | None = None

    @property
    def blocks(self) -> int:
        """Blocks that are awaited."""
        return len(self.hashes) // HASH_BYTES

    def drop(self) -> None:
        """Give the wait up, at the store too. Idempotent."""
        if self.wait is not None:
            self.wait.cancel()


@dataclass(eq=False)
class Landings:
    """Follows landings. Thread and connection begin with the first; `close` ends both.

    open_client: makes the client, in the thread's loop; this object owns it.
    news: is set whenever a block landed or a wait ended.
    """

    open_client: Callable[[], AsyncStoreClient]
    news: threading.Event
    log: logging.Logger
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: AsyncStoreClient | None = None
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._closed = False

    def follow(self, manifest: Manifest, hashes: bytes, wait_s: float) -> AwaitedPrefix:
        """Follow consecutive blocks of a chain, at most `wait_s` seconds. Never blocks."""
        coming = AwaitedPrefix(hashes)
        if self._closed:
            coming.over = True
            return coming
        following = self._follow(manifest, coming, self.clock() + wait_s)
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
        client = self._client = self.open_client()
        client.start()
        self._ready.set()
        await self._stop.wait()
        waits = asyncio.all_tasks() - {asyncio.current_task()}
        await client.close()
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _follow(self, manifest: Manifest, coming: AwaitedPrefix, until: float) -> None:
        try:
            await self._ready.wait()
            assert self._client is not None
            await self._client.wait_connected(CONNECT_S)
            while coming.landed < coming.blocks and (left_s := until - self.clock()) > 0:
                rest = coming.hashes[coming.landed * HASH_BYTES :]
                # It waits for the next block alone; the answer says how many came with it.
                landing = await self._client.wait(manifest, rest, 1, left_s)
                if not landing.landed:
                    break
                coming.landed += max(1, landing.blocks)
                self.news.set()
        except KVStoreError as error:
            self.log.debug("a landing is awaited no longer: %s", error)
        finally:
            coming.over = True
            self.news.set()
