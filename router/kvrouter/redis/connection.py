"""One owner of a client of Redis: deadlines, back-off, and news from channels.

Nothing that serves a request waits for it: those who publish and read do so in tasks of their own.
It knows no keys. `redis` is imported when a link is made, so that a start without one stays quick.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvrouter_store.connection.backoff import BackOff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.asyncio.client import PubSub
    from redis.asyncio.connection import AbstractConnection

    Command = Sequence[str | bytes | int | float]

DEADLINE_S: Final = 1.0
"""That one operation may take, connecting included. Redis answers in less than a millisecond."""
IDLE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 1.0
MAX_COMMANDS: Final = 512
"""Commands in one batch."""

log = logging.getLogger(__name__)


class RedisUnavailable(Exception):
    """Redis is not there, does not answer in time, or is not tried again yet; says so."""


class RedisRefused(Exception):
    """Redis answered a command with an error, in its words."""


class RedisLink:
    """Asks one Redis, and listens to it. Operations of several tasks take turns.

    After a failure every operation fails at once for a while (doubled up to LONGEST_PAUSE_S).

    Args:
        url: redis://[:PASSWORD@]HOST:PORT/DB, or rediss:// for TLS.
        deadline_s: for each operation.
        idle_s: of silence after which a listener asks Redis whether it is still there.
        clock: seconds, monotonic.

    Attributes:
        connected: whether the last operation was answered.
        counts: connects, failures, refused: each only grows.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = DEADLINE_S,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from redis.asyncio import Redis  # noqa: PLC0415 - only where it is used
        from redis.asyncio.connection import ConnectionPool, parse_url  # noqa: PLC0415
        from redis.exceptions import RedisError  # noqa: PLC0415

        self._url = url
        self._deadline_s = deadline_s
        self._idle_s = idle_s
        self._clock = clock
        self._failures = (RedisError, OSError, TimeoutError)
        options: dict[str, Any] = {
            **parse_url(url),
            # Deadlines are ours: its own use wait_for, which in Python 3.11 can swallow a
            # cancellation.
            "socket_timeout": None,
            "socket_connect_timeout": None,
            "protocol": 2,
            "client_name": "kvrouter",
            "redis_connect_func": self._connect,
        }
        self._redis = Redis.from_pool(ConnectionPool(**options))
        self._redis.response_callbacks.clear()  # answers stay as Redis gave them
        self._turn = asyncio.Lock()
        self._back_off = BackOff(longest_s=LONGEST_PAUSE_S)
        self._lost = False
        self._closed = False
        self.connected = False
        self.counts: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """Its URL without what must not be shown: for logs."""
        return shown(self._url)

    async def call(self, *command: str | bytes | float) -> Any:
        """The answer to one command: bytes, int, None or a list of such.

        Raises:
            RedisUnavailable: nothing is known of what became of it.
            RedisRefused: it was answered with an error.
        """
        return (await self.batch([command]))[0]

    async def batch(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to several commands, sent in one go and done in their order.

        Other clients' commands may come between. At most MAX_COMMANDS.

        Raises:
            RedisUnavailable: nothing is known of what became of any of them.
            RedisRefused: one was answered with an error; the others were done.
        """
        if len(commands) > MAX_COMMANDS:
            raise ValueError(f"{len(commands)} commands in one batch, more than {MAX_COMMANDS}")
        async with self._turn:
            remaining_s = self._back_off.remaining_s(self._clock())
            if self._closed or remaining_s:
                raise RedisUnavailable(f"{self.name} is not tried again for {remaining_s:.2f} s")
            pipeline = self._redis.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            try:
                async with asyncio.timeout(self._deadline_s):
                    answers: list[Any] = await pipeline.execute(raise_on_error=False)
            except self._failures as error:
                raise self._failed(error) from None
            self._succeeded()
        for answer in answers:
            if isinstance(answer, Exception):
                self.counts["refused"] += 1
                raise RedisRefused(str(answer))
        return answers

    async def listen(
        self,
        channels: Sequence[str],
        take: Callable[[str, bytes], None],
        subscribed: Callable[[], None],
    ) -> None:
        """Give `take` each message of `channels` with its channel's name, until cancelled.

        It has a connection of its own and makes it again by itself.

        Args:
            channels: names.
            take: must be quick and raise nothing.
            subscribed: called each time that listening has begun (again): what was said before is
                lost.
        """
        pauses = BackOff(longest_s=LONGEST_PAUSE_S)
        while True:
            try:
                async with self._redis.pubsub() as news:
                    async with asyncio.timeout(self._deadline_s):
                        await news.subscribe(*channels)
                        for _ in channels:
                            await news.get_message(timeout=None)  # that it is subscribed
                    pauses.succeeded()
                    subscribed()
                    while True:
                        message = await self._next(news)
                        if message["type"] == "message":
                            take(message["channel"].decode("utf-8", "replace"), message["data"])
            except self._failures as error:
                self.counts["failures"] += 1
                log.debug("listening to %s: %s", self.name, error or "no answer in time")
                pauses.failed(self._clock())
                await asyncio.sleep(pauses.remaining_s(self._clock()))

    async def close(self) -> None:
        """Drop the connections; operations fail from now on. Idempotent."""
        self._closed = True
        async with self._turn:
            self.connected = False
            with suppress(*self._failures):
                async with asyncio.timeout(self._deadline_s):
                    await self._redis.aclose()

    async def _next(self, news: PubSub) -> Any:
        """What Redis says next, if only that it is still there.

        Raises:
            TimeoutError: it does not say even that.
        """
        async with asyncio.timeout(self._idle_s + self._deadline_s):
            message = await news.get_message(timeout=self._idle_s)
            if message is None:
                await news.ping()
                message = await news.get_message(timeout=None)
        return message

    async def _connect(self, connection: AbstractConnection) -> None:
        """What a connection does first, by `redis`."""
        await connection.on_connect()
        self.counts["connects"] += 1

    def _failed(self, error: Exception) -> RedisUnavailable:
        self.connected = False
        self._back_off.failed(self._clock())
        self.counts["failures"] += 1
        reason = str(error) or f"no answer within {self._deadline_s:g} s"
        if not self._lost:
            self._lost = True
            log.warning("%s is away: %s; requests do without it", self.name, reason)
        return RedisUnavailable(f"{self.name}: {reason}")

    def _succeeded(self) -> None:
        self.connected = True
        self._back_off.succeeded()
        if self._lost:
            self._lost = False
            log.info("%s is there again", self.name)


def shown(url: str) -> str:
    """The URL without user, password and options."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or 6379}{parts.path}"


def checked(url: str) -> str:
    """The URL of a Redis, as it was given.

    Raises:
        ValueError: it is none; says how one looks, without repeating a password.
    """
    remedy = "give it as redis://[:PASSWORD@]HOST:PORT/DB, or rediss:// for TLS"
    try:
        parts = urlsplit(url)
        database = parts.path.strip("/")
        named = parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        raise ValueError(remedy) from None
    if parts.scheme not in ("redis", "rediss") or not named:
        raise ValueError(remedy)
    if database and not database.isdecimal():
        raise ValueError(f"the database {database!r} is no number: {remedy}")
    return url
