"""The HTTP side of another project's store: questions with JSON answers, each with a deadline."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from yarl import URL

from kvrouter.membership.bounded_answer import read_bounded
from kvrouter_store.errors import KVStoreError, StoreRefused, StoreUnavailable

ANSWER_S: Final = 1.0
"""For one answer, connecting included."""
HEALTH_S: Final = 1.0
"""Between two questions whether the store is well."""
KEPT_S: Final = 4.0
"""An idle connection; servers close theirs later, so that no question meets a closing one."""
MAX_ANSWER_BYTES: Final = 16 << 20
MAX_CONNECTIONS: Final = 32

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HttpPeer:
    """Asks one server over kept connections. Its owner calls `start`, and `close`.

    A question without an answer makes the server away: others then fail at once, until its health
    page answers again. So a server that hangs holds up few requests.

    Attributes:
        url: as the operator wrote it, for logs.
        base: http://HOST:PORT.
        health_path: answers 200 with JSON while the server is well.
        connected: whether it answers.
    """

    url: str
    base: str
    health_path: str
    connected: bool = field(default=False, init=False)
    _told: bool | None = field(default=None, init=False)  # what the log says of `connected`
    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _watching: asyncio.Task[None] | None = field(default=None, init=False)

    def start(self) -> None:
        """Follow the server's health from now on."""
        self._watching = asyncio.create_task(self._watch(), name="store health")

    async def wait_connected(self, deadline_s: float) -> bool:
        """Ask for its health once; whether it is well."""
        with suppress(KVStoreError, TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self.stats()
        return self.connected

    async def close(self) -> None:
        """Stop following, and close the connections. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def stats(self) -> dict[str, int]:
        """Ask its health page, also while it is away; it has no figures. Raises KVStoreError."""
        try:
            await self._ask(self.health_path, dict[str, Any], None)
        except StoreRefused as error:  # not the server that the operator means
            raise self._lost(str(error)) from None
        self._note(connected=True)
        return {}

    async def ask(self, path: str, kind: type[Answer], sent: bytes | None = None) -> Answer:
        """The 200 to a GET, or to a POST of JSON, read as `kind`.

        Raises:
            StoreUnavailable: it is away, did not answer in time, or answered what cannot be read.
            StoreRefused: it refused this question.
        """
        if not self.connected:
            raise StoreUnavailable(f"{self.url} is away")
        return await self._ask(path, kind, sent)

    async def _ask(self, path: str, kind: type[Answer], sent: bytes | None) -> Answer:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEPT_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        try:
            async with self._session.request(
                "GET" if sent is None else "POST",
                URL(self.base + path, encoded=True),
                data=None if sent is None else BytesIO(sent),  # which aiohttp reads in pieces
                headers={} if sent is None else {"content-type": "application/json"},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            ) as answer:
                content = await read_bounded(answer, MAX_ANSWER_BYTES, StoreUnavailable)
            if answer.status == 200:
                return msgspec.json.decode(content, type=kind)
        except TimeoutError:
            raise self._lost(f"no answer within {ANSWER_S:g} s") from None
        except (aiohttp.ClientError, ValueError, RecursionError, StoreUnavailable) as error:
            raise self._lost(str(error) or type(error).__name__) from None
        told = f"{path.partition('?')[0]} answers {answer.status}: {content[:200]!r}"
        raise StoreRefused(told) if 400 <= answer.status < 500 else self._lost(told)

    def _lost(self, why: str) -> StoreUnavailable:
        self._note(connected=False, why=why)
        return StoreUnavailable(f"{self.url}: {why}")

    def _note(self, *, connected: bool, why: str = "") -> None:
        if connected and not self._told:
            log.info("store %s answers", self.url)
        elif not connected and self._told is not False:
            log.warning("store %s is away: %s", self.url, why)
        self.connected = self._told = connected

    async def _watch(self) -> None:
        while True:
            with suppress(KVStoreError):
                await self.stats()
            await asyncio.sleep(HEALTH_S)
