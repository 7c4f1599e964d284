"""The HTTP side of another project's store: questions with JSON answers, each with a deadline."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from yarl import URL

from kvrouter.http.bounded_json import bounded
from kvrouter.membership.bounded_answer import read_bounded
from kvrouter_store.errors import KVStoreError, StoreRefused, StoreUnavailable
from kvrouter_store.system_errors import reason_of

ANSWER_S: Final = 1.0
"""For one answer, connecting included."""
HEALTH_S: Final = 1.0
"""Between two questions whether the store is well."""
KEPT_S: Final = 4.0
"""An idle connection; servers close theirs later, so that no question meets a closing one."""
MAX_ANSWER_BYTES: Final = 8 << 20
"""LMCache answers a prompt of a million tokens with 7 MB."""
MAX_CONNECTIONS: Final = 32

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HttpPeer:
    """Asks one server over kept connections. Its owner calls `start`, and `close`.

    A question without an answer makes the server away: others then fail at once, until its health
    page answers again. So a server that hangs holds up few requests.
    """

    url: str  # SCHEME://HOST:PORT, as the operator wrote it
    health_path: str  # answers 200 with JSON while the server is well
    server: str  # what the URL must name, for people
    connected: bool = field(default=False, init=False)
    slow: bool = field(default=False, init=False)  # it is away for want of an answer in time
    _told: str = field(default="", init=False)  # its state, as the log has it
    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _watching: asyncio.Task[None] | None = field(default=None, init=False)

    async def start(self, wait_s: float) -> None:
        """Ask for its health, for at most `wait_s`, and follow it from now on."""
        with suppress(KVStoreError, TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.stats()
        self._watching = asyncio.create_task(self._watch(), name="store health")

    async def close(self) -> None:
        """Stop following, and close the connections. Idempotent."""
        self.connected = False
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def stats(self) -> dict[str, int]:
        """Ask its health page, also while it is away; it has no figures. Raises KVStoreError."""
        await self._ask(self.health_path, dict[str, Any], None)
        if not self.connected:
            self.connected, self.slow, self._told = True, False, ""
            log.info("store %s answers", self.url)
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

    def refusal(self, why: str) -> StoreRefused:
        """What to raise where it refuses what others may still ask; its reason is logged once."""
        return StoreRefused(self._tell("refuses a question", why))

    async def _ask(self, path: str, kind: type[Answer], sent: bytes | None) -> Answer:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEPT_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        try:
            async with self._session.request(
                "GET" if sent is None else "POST",
                URL(f"http://{urlsplit(self.url).netloc}{path}", encoded=True),
                data=None if sent is None else BytesIO(sent),  # which aiohttp reads in pieces
                headers={} if sent is None else {"content-type": "application/json"},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            ) as answer:
                content = await read_bounded(answer, MAX_ANSWER_BYTES, self.refusal)
            if answer.status == 200:
                return msgspec.json.decode(bounded(content, MAX_ANSWER_BYTES), type=kind)
        except TimeoutError:
            raise self._lost(f"no answer within {ANSWER_S:g} s", slow=True) from None
        except aiohttp.ClientConnectorError as error:
            raise self._lost(reason_of(error.os_error)) from None
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            raise self._lost(str(error) or type(error).__name__) from None
        told = f"{path.partition('?')[0]} answers {answer.status}"
        if path == self.health_path:
            raise self._lost(told)
        told += f": {content[:200]!r}"
        raise self.refusal(told) if 400 <= answer.status < 500 else self._lost(told)

    def _lost(self, why: str, *, slow: bool = False) -> StoreUnavailable:
        self.connected, self.slow = False, slow
        remedy = f"see that it runs, and that this is {self.server}"
        return StoreUnavailable(self._tell("is away", f"{why}; {remedy}"))

    def _tell(self, state: str, why: str) -> str:
        """Log what it is from now on, unless the log says so already."""
        text = f"store {self.url} {state}: {why}"
        if state != self._told:
            log.warning(text)
        self._told = state
        return text

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            with suppress(KVStoreError):
                await self.stats()
