"""A client of one Redis: a deadline for each operation, metrics, and subscriptions that come back.

No request waits for it: publishers and readers run in tasks of their own. It knows no keys.
`redis` is imported when a client is made, so that a router without Redis starts quickly.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.asyncio.client import PubSub
    from redis.asyncio.connection import AbstractConnection

    Command = Sequence[str | bytes | int | float]

DEADLINE_S: Final = 1.0
"""Of one operation, connecting included. Redis answers in less than a millisecond."""
IDLE_S: Final = 1.0
RETRY_S: Final = 0.25  # pause of a subscription before it connects again
MAX_COMMANDS: Final = 512  # commands in one batch

log = logging.getLogger(__name__)


class RedisFailed(Exception):
    """Redis cannot be reached, did not answer in time, or refused a command; a sentence."""


@dataclass(eq=False, repr=False)
class RedisClient:
    """Sends commands to one Redis, and subscribes to its channels. Operations take turns.

    A failed operation is not repeated: Redis may have carried it out.
    """

    url: str  # redis://[:PASSWORD@]HOST:PORT/DB, or rediss:// for TLS
    deadline_s: float = DEADLINE_S  # of each operation
    idle_s: float = IDLE_S  # silence after which a subscription asks Redis for a sign of life
    connected: bool = field(default=False, init=False)  # whether the last operation was answered
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """connects, failures, refused; each only grows."""

    def __post_init__(self) -> None:
        from redis.asyncio import Redis  # noqa: PLC0415 - only where it is used
        from redis.asyncio.connection import ConnectionPool, parse_url  # noqa: PLC0415
        from redis.asyncio.retry import Retry  # noqa: PLC0415
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.exceptions import RedisError  # noqa: PLC0415

        self._failures = (RedisError, OSError, TimeoutError)
        options: dict[str, Any] = {
            **parse_url(self.url),
            "socket_timeout": None,  # one deadline for all that an operation does, set below
            "socket_connect_timeout": None,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "client_name": "kvrouter",
            "redis_connect_func": self._connect,
        }
        self._redis = Redis.from_pool(ConnectionPool(**options))
        self._redis.response_callbacks.clear()  # answers stay as Redis gave them
        self._turn = asyncio.Lock()
        self._lost = False
        self._closed = False

    @property
    def name(self) -> str:
        """Its URL without secrets, for logs."""
        return shown(self.url)

    async def call(self, *command: str | bytes | float) -> Any:
        """The answer to one command: bytes, int, None or a list of such.

        RedisFailed: without an answer it is unknown whether Redis carried the command out.
        """
        return (await self.batch([command]))[0]

    async def batch(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to at most MAX_COMMANDS commands, sent together and executed in their order.

        Commands of other clients may come between.

        RedisFailed: Redis refused one and carried out the others, or gave no answer.
        """
        if len(commands) > MAX_COMMANDS:
            raise ValueError(f"{len(commands)} commands in one batch, more than {MAX_COMMANDS}")
        async with self._turn:
            if self._closed:
                raise RedisFailed(f"{self.name}: the client is closed")
            pipeline = self._redis.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            try:
                async with asyncio.timeout(self.deadline_s):
                    answers: list[Any] = await pipeline.execute(raise_on_error=False)
            except self._failures as error:
                raise self._failed(error) from None
            self._succeeded()
        for answer in answers:
            if isinstance(answer, Exception):
                self.counts["refused"] += 1
                raise RedisFailed(f"{self.name} refused a command: {answer}")
        return answers

    async def listen(
        self,
        channels: Sequence[str],
        take: Callable[[str, bytes], None],
        subscribed: Callable[[], None],
    ) -> None:
        """Give `take` each message of `channels` with its channel's name, until cancelled.

        The subscription has a connection of its own, and connects again by itself.

        Args:
            channels: names.
            take: must be quick, and must not raise.
            subscribed: called at each beginning; earlier messages may be lost.
        """
        while True:
            try:
                async with self._redis.pubsub() as subscription:
                    async with asyncio.timeout(self.deadline_s):
                        await subscription.subscribe(*channels)
                        for _ in channels:
                            await subscription.get_message(timeout=None)  # it is subscribed
                    subscribed()
                    while True:
                        message = await self._next(subscription)
                        if message["type"] == "message":
                            take(message["channel"].decode("utf-8", "replace"), message["data"])
                            await asyncio.sleep(0)  # messages that are here already take turns too
            except self._failures as error:
                self.counts["failures"] += 1
                log.debug("subscription to %s: %s", self.name, error or "no answer in time")
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Close the connections; operations fail from now on. Idempotent."""
        self._closed = True
        async with self._turn:
            self.connected = False
            with suppress(*self._failures):
                async with asyncio.timeout(self.deadline_s):
                    await self._redis.aclose()

    async def _next(self, subscription: PubSub) -> Any:
        """The next message, or Redis's sign of life after silence.

        TimeoutError: there is none; redis-py would wait for it for ever.
        """
        async with asyncio.timeout(self.idle_s + self.deadline_s):
            message = await subscription.get_message(timeout=self.idle_s)
            if message is None:
                await subscription.ping()
                message = await subscription.get_message(timeout=None)
        return message

    async def _connect(self, connection: AbstractConnection) -> None:
        """Called by redis-py for each new connection."""
        await connection.on_connect()
        self.counts["connects"] += 1

    def _failed(self, error: Exception) -> RedisFailed:
        self.connected = False
        self.counts["failures"] += 1
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = reason_of(cause) if isinstance(cause, OSError) else str(cause)
        reason = reason or f"no answer within {self.deadline_s:g} s"
        if not self._lost:
            self._lost = True
            log.warning("%s is away: %s; requests go on without it", self.name, reason)
        return RedisFailed(f"{self.name}: {reason}")

    def _succeeded(self) -> None:
        self.connected = True
        if self._lost:
            self._lost = False
            log.info("%s is back", self.name)


def shown(url: str) -> str:
    """The URL without user, password and options."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or 6379}{parts.path}"


def with_password(url: str, password: str) -> str:
    """The URL with that password in place of its own."""
    parts = urlsplit(url)
    user, _, place = parts.netloc.rpartition("@")
    named = f"{user.partition(':')[0]}:{quote(password, safe='')}@{place}"
    return parts._replace(netloc=named).geturl()


def checked(url: str) -> str:
    """The URL of a Redis, unchanged.

    ValueError: it is wrong; a sentence that does not repeat a password.
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
