"""The client of Redis: deadlines, no repeated commands, and subscriptions that come back."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from pydantic import ValidationError
from tests.fakes.patience import until
from tests.fakes.redis import RedisServer

from kvrouter.app.settings import RouterSettings
from kvrouter.redis.client import (
    MAX_COMMANDS,
    RedisClient,
    RedisFailed,
    checked,
    shown,
)

PATIENCE_S = 20.0


@asynccontextmanager
async def link_to(
    redis: RedisServer, *, deadline_s: float = PATIENCE_S, idle_s: float = 1.0
) -> AsyncIterator[RedisClient]:
    link = RedisClient(redis.url, deadline_s=deadline_s, idle_s=idle_s)
    try:
        yield link
    finally:
        await link.close()


async def again(link: RedisClient) -> None:
    """Returns once Redis answers."""

    async def answers() -> bool:
        with suppress(RedisFailed):
            await link.call("PING")
            return True
        return False

    await until(answers, PATIENCE_S, look_s=0.02)


class Heard:
    """What a listener took, and how often it began anew."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.begins = 0
        self._news = asyncio.Event()

    def take(self, channel: str, message: bytes) -> None:
        self.messages.append((channel, message))
        self._news.set()

    def subscribed(self) -> None:
        self.begins += 1
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def listening(link: RedisClient, heard: Heard, *channels: str) -> AsyncIterator[None]:
    task = asyncio.create_task(link.listen(channels, heard.take, heard.subscribed))
    try:
        await heard.until(lambda: heard.begins > 0)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_commands_are_answered_in_their_order(redis: RedisServer) -> None:
    async with link_to(redis) as link:
        assert not link.connected
        answers = await link.batch([("SET", "k", b"\x00\xff"), ("GET", "k"), ("GET", "none")])
        assert answers == [b"OK", b"\x00\xff", None]
        assert link.connected


async def test_tasks_take_turns_on_one_connection(redis: RedisServer) -> None:
    async with link_to(redis) as link:
        calls = [link.call("INCR", "n") for _ in range(50)]
        assert sorted(await asyncio.gather(*calls)) == list(range(1, 51))
        assert link.counts["connects"] == 1


async def test_what_redis_refuses_is_an_error_and_the_connection_stays(redis: RedisServer) -> None:
    async with link_to(redis) as link:
        with pytest.raises(RedisFailed, match="unknown command"):
            await link.batch([("SET", "k", "1"), ("NOSUCH",), ("INCR", "k")])
        assert await link.call("GET", "k") == b"2"
        assert link.counts == {"connects": 1, "refused": 1}


async def test_options_of_the_url_change_nothing_of_how_redis_is_asked(redis: RedisServer) -> None:
    link = RedisClient(f"{redis.url}?socket_timeout=0.000001&client_name=other&protocol=3")
    assert await link.call("CLIENT", "GETNAME") == b"kvrouter"
    assert await link.call("HGETALL", "none") == []
    await link.close()


async def test_a_batch_is_bounded(redis: RedisServer) -> None:
    async with link_to(redis) as link:
        with pytest.raises(ValueError, match="commands in one batch"):
            await link.batch([("PING",)] * (MAX_COMMANDS + 1))


async def test_a_redis_that_is_killed_and_back_is_used_again(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with link_to(redis) as link:
        await link.call("PING")
        redis.kill()
        for _ in range(5):
            with pytest.raises(RedisFailed):
                await link.call("PING")
        assert not link.connected
        redis.start()
        await again(link)
    told = [r.message for r in caplog.records if r.name == "kvrouter.redis.client"]
    assert len(told) == 2
    assert "is away" in told[0]
    assert "is back" in told[1]


async def test_a_command_without_an_answer_is_not_sent_again(redis: RedisServer) -> None:
    async with link_to(redis, deadline_s=0.2) as link:
        await link.call("PING")
        redis.stall()
        with pytest.raises(RedisFailed):
            await link.call("INCR", "n")
        redis.resume()
        await again(link)
        assert await link.call("GET", "n") == b"1"


async def test_a_closed_client_sends_nothing(redis: RedisServer) -> None:
    link = RedisClient(redis.url)
    await link.close()
    with pytest.raises(RedisFailed, match="closed"):
        await link.call("PING")


async def test_a_stalled_redis_costs_a_call_no_more_than_its_deadline(redis: RedisServer) -> None:
    async with link_to(redis, deadline_s=0.2) as link:
        await link.call("SET", "k", "old")
        redis.stall()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RedisFailed):
                await link.call("GET", "k")
        redis.resume()
        await again(link)
        assert await link.call("PING") == b"PONG", "the late answer was taken for another's"


async def test_a_call_that_is_cancelled_leaves_no_answer_for_the_next(redis: RedisServer) -> None:
    async with link_to(redis) as link:
        await link.call("SET", "k", "v")
        redis.stall()
        call = asyncio.create_task(link.call("GET", "k"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        redis.resume()
        await again(link)
        assert await link.call("PING") == b"PONG"


async def test_a_listener_hears_what_is_published(redis: RedisServer) -> None:
    heard = Heard()
    async with link_to(redis) as link, listening(link, heard, "a", "b"):
        await link.batch([("PUBLISH", "a", b"1"), ("PUBLISH", "c", b"2"), ("PUBLISH", "b", b"3")])
        await heard.until(lambda: len(heard.messages) == 2)
        assert heard.messages == [("a", b"1"), ("b", b"3")]
        assert heard.begins == 1


@pytest.mark.parametrize("how", ["killed", "stalled"])
async def test_a_listener_begins_anew_when_redis_is_back(redis: RedisServer, how: str) -> None:
    heard = Heard()
    more = {"idle_s": 0.1, "deadline_s": 0.3} if how == "stalled" else {}
    async with link_to(redis, **more) as link, listening(link, heard, "a"):
        if how == "killed":
            redis.kill()
            redis.start()
        else:
            redis.stall()
            await until(lambda: link.counts["failures"], PATIENCE_S)
            redis.resume()
        await heard.until(lambda: heard.begins >= 2)
        async with link_to(redis) as other:
            await until(lambda: heard.messages, meanwhile=lambda: other.call("PUBLISH", "a", b"x"))
        assert heard.messages[0] == ("a", b"x")


async def test_a_listener_stays_while_nothing_is_said(redis: RedisServer) -> None:
    heard = Heard()
    async with link_to(redis, idle_s=0.05) as quick, listening(quick, heard, "a"):

        async def has_pinged() -> bool:
            return (await commands_so_far(link)).get("ping", 0) >= 3

        async with link_to(redis) as link, asyncio.timeout(PATIENCE_S):
            await until(has_pinged, look_s=0.02)
            await link.call("PUBLISH", "a", b"x")
        await heard.until(lambda: heard.messages == [("a", b"x")])
        assert heard.begins == 1


async def commands_so_far(link: RedisClient) -> dict[str, int]:
    """How often Redis was given each command."""
    page = (await link.call("INFO", "commandstats")).decode()
    found = re.findall(r"^cmdstat_(\w+):calls=(\d+)", page, re.MULTILINE)
    return {name: int(calls) for name, calls in found}


async def test_a_wrong_password_is_told_and_not_shown(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with link_to(redis) as link:
        await link.call("CONFIG", "SET", "requirepass", "right")
    wrong = RedisClient(redis.url.replace("//", "//:very-secret@"))
    with pytest.raises(RedisFailed) as refused:
        await wrong.call("PING")
    assert "very-secret" not in caplog.text + str(refused.value)
    right = RedisClient(redis.url.replace("//", "//:right@"))
    assert await right.call("PING") == b"PONG"
    await right.close()
    await wrong.close()


def test_what_is_shown_of_a_url_holds_no_password() -> None:
    assert shown("redis://user:secret@h:1/2?x=y") == "redis://h:1/2"
    assert shown("rediss://[::1]") == "rediss://[::1]:6379"


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://:p@h:6380/3", "redis://[::1]:6379/0?ssl_ca_certs=ca.pem"]
)
def test_a_url_of_a_redis_is_taken(url: str) -> None:
    assert checked(url) == url
    assert RouterSettings(decode=["h:1"], redis=url).redis.get_secret_value() == url  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["h:6379", "http://h", "redis://", "redis://h:x", "redis://h/one"])
def test_what_is_no_url_of_a_redis_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ValidationError, match="redis://"):
        RouterSettings(decode=["h:1"], redis=url)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["", "a b", "a" * 65, "a*"])
def test_a_prefix_that_redis_would_not_take_as_it_is_is_refused(prefix: str) -> None:
    with pytest.raises(ValidationError, match="letters"):
        RouterSettings(decode=["h:1"], redis_prefix=prefix)
