"""One owner of a connection to Redis: deadlines, back-off, and news from channels.

Nothing that serves a request waits for it: those who publish and read do so in tasks of their own.
It knows no keys. `redis` is imported when a link is made, so that a start without one stays quick.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvstore.backoff import BackOff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

    After a failure the connection is dropped, since an answer may still be on its way, and for a
    while (doubled up to LONGEST_PAUSE_S) every operation fails at once.

    Args:
        url: redis://[:PASSWORD@]HOST:PORT/DB, or rediss:// for TLS.
        deadline_s: for each operation.
        idle_s: of silence after which a listener asks Redis whether it is still there.
        clock: seconds, monotonic.

    Attributes:
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
        self._url = url
        self._deadline_s = deadline_s
        self._idle_s = idle_s
        self._clock = clock
        self._asking = _Wire(url, deadline_s)
        self._turn = asyncio.Lock()
        self._back_off = BackOff(longest_s=LONGEST_PAUSE_S)
        self._lost = False
        self._closed = False
        self.counts: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """Its URL without what must not be shown: for logs."""
        return shown(self._url)

    @property
    def connected(self) -> bool:
        """Whether the last operation was answered."""
        return self._asking.connected

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
            try:
                async with asyncio.timeout(self._deadline_s):
                    if not self._asking.connected:
                        await self._asking.connect()
                        self.counts["connects"] += 1
                    answers = await self._asking.exchange(commands)
            except (OSError, TimeoutError) as error:
                raise await self._failed(self._asking, error) from None
            except BaseException:
                await self._asking.close()  # cancelled: the answers would be taken for others'
                raise
            self._succeeded()
        for answer in answers:
            if isinstance(answer, RedisRefused):
                self.counts["refused"] += 1
                raise answer
        return answers

    async def listen(
        self,
        channels: Sequence[str],
        take: Callable[[str, bytes], None],
        subscribed: Callable[[], None] | None = None,
    ) -> None:
        """Give `take` each message of `channels` with its channel's name, until cancelled.

        It has a connection of its own and makes it again by itself.

        Args:
            channels: names.
            take: must be quick and raise nothing.
            subscribed: called each time that listening has begun (again): what was said before is
                lost.
        """
        wire, back_off = _Wire(self._url, self._deadline_s), BackOff(longest_s=LONGEST_PAUSE_S)
        try:
            while True:
                try:
                    async with asyncio.timeout(self._deadline_s):
                        await wire.connect()
                        early = await wire.subscribe(channels)
                    back_off.succeeded()
                    if subscribed is not None:
                        subscribed()
                    for message in early:
                        _hand_over(message, take)
                    while True:
                        await self._next_message(wire, take)
                except (OSError, TimeoutError) as error:
                    self.counts["failures"] += 1
                    log.debug("listening to %s: %s", self.name, error or "no answer in time")
                    await wire.close()
                    back_off.failed(self._clock())
                    await asyncio.sleep(back_off.remaining_s(self._clock()))
        finally:
            await wire.close()

    async def close(self) -> None:
        """Drop the connection; operations fail from now on. Idempotent."""
        self._closed = True
        async with self._turn:
            await self._asking.close()

    async def _next_message(self, wire: _Wire, take: Callable[[str, bytes], None]) -> None:
        """Take one message, or find that Redis is still there.

        Raises:
            OSError: it is not.
        """
        message = await wire.read(self._idle_s)
        if message is None:
            async with asyncio.timeout(self._deadline_s):
                await wire.send("PING")
            message = await wire.read(self._deadline_s)
        if message is None:
            raise ConnectionError("it does not answer PING")
        _hand_over(message, take)

    async def _failed(self, wire: _Wire, error: Exception) -> RedisUnavailable:
        await wire.close()
        self._back_off.failed(self._clock())
        self.counts["failures"] += 1
        reason = str(error) or f"no answer within {self._deadline_s:g} s"
        if not self._lost:
            self._lost = True
            log.warning("%s is away: %s; requests do without it", self.name, reason)
        return RedisUnavailable(f"{self.name}: {reason}")

    def _succeeded(self) -> None:
        self._back_off.succeeded()
        if self._lost:
            self._lost = False
            log.info("%s is there again", self.name)


class _Wire:
    """A connection of redis-py, with its errors made OSError. One task at a time."""

    def __init__(self, url: str, deadline_s: float) -> None:
        from redis import exceptions  # noqa: PLC0415 - only where it is used
        from redis.asyncio import connection  # noqa: PLC0415

        self._redis, self._errors = connection, exceptions
        self._url = url
        self._deadline_s = deadline_s
        self._connection: Any = None

    @property
    def connected(self) -> bool:
        return self._connection is not None

    async def connect(self) -> None:
        """Connect, authenticate and select the database."""
        kwargs: dict[str, Any] = dict(self._redis.parse_url(self._url))
        kind = kwargs.pop("connection_class", self._redis.Connection)
        # Deadlines are ours: its own use wait_for, which in Python 3.11 can swallow a cancellation.
        kwargs |= {"socket_timeout": None, "socket_connect_timeout": None}
        made = kind(**kwargs, protocol=2, client_name="kvrouter")
        try:
            await made.connect()
        except self._errors.RedisError as error:
            raise ConnectionError(str(error)) from None
        except BaseException:
            await made.disconnect(nowait=True)
            raise
        self._connection = made

    async def send(self, *command: str | bytes | float) -> None:
        try:
            await self._connection.send_command(*command, check_health=False)
        except self._errors.RedisError as error:
            raise ConnectionError(str(error)) from None

    async def read(self, timeout_s: float) -> Any:
        """The next message, or None where none comes within the time."""
        try:
            return await self._connection.read_response(timeout=timeout_s)
        except self._errors.RedisError as error:
            raise ConnectionError(str(error)) from None

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send all, then read as many answers; errors that Redis answered are among these."""
        connection, answers = self._connection, []
        try:
            packed = connection.pack_commands(commands)
            await connection.send_packed_command(packed, check_health=False)
            for _ in commands:
                try:
                    answers.append(await connection.read_response())
                except self._errors.ResponseError as error:
                    answers.append(RedisRefused(str(error)))
        except self._errors.RedisError as error:
            raise ConnectionError(str(error)) from None
        return answers

    async def subscribe(self, channels: Sequence[str]) -> list[Any]:
        """Returns when the messages of every channel come from now on, with those that did."""
        await self.send("SUBSCRIBE", *channels)
        early, awaited = [], len(channels)
        while awaited:
            answer = await self.read(self._deadline_s)
            if answer is None:
                raise ConnectionError("it does not answer SUBSCRIBE")
            if isinstance(answer, list) and answer[0] == b"subscribe":
                awaited -= 1
            else:
                early.append(answer)
        return early

    async def close(self) -> None:
        """Drop the connection, whatever is under way on it. Idempotent."""
        made, self._connection = self._connection, None
        if made is not None:
            await made.disconnect(nowait=True)


def _hand_over(message: Any, take: Callable[[str, bytes], None]) -> None:
    if isinstance(message, list) and len(message) == 3 and message[0] == b"message":
        take(message[1].decode("utf-8", "replace"), message[2])


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
