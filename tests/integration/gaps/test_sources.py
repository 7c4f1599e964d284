"""No name server, and no stranger in a shared Redis, keeps the router's loop from its streams."""

from pathlib import Path

import pytest
from redis import Redis
from tests.fakes.discovery import LOOK_S, dns_server
from tests.fakes.redis import MISSING, RedisServer, redis_server
from tests.integration.discovery.conftest import followed
from tests.integration.gaps.meter import MOST_S, GapMeter

from kvrouter.membership.discovery import make_source
from kvrouter.membership.discovery.base import MAX_MEMBERS, SourceContext
from kvrouter.membership.discovery.redis import EntryKeys
from kvrouter.redis.client import RedisClient

NAME, SERVICE = "decode.test.", "_engine._tcp.decode.test."


@pytest.mark.parametrize("kind", ["A", "AAAA", "SRV"])
async def test_the_longest_answer_of_a_name_server(kind: str) -> None:
    records = {
        "A": [f"10.1.{n // 250}.{n % 250}" for n in range(4090)],
        "AAAA": [f"2001:db8::{n:x}" for n in range(2338)],
        "SRV": [f"0 0 {8000 + n} one.test." for n in range(2300)],
    }
    scheme, name = ("srv", SERVICE) if kind == "SRV" else ("dns", NAME)
    place = name if kind == "SRV" else f"{name}:8000"
    async with dns_server() as server:
        server.set(name, kind, *records[kind])
        server.set("one.test.", "A", "10.0.0.1")
        source = f"{scheme}://{place}?role=decode&resolver={server.resolver}&interval={LOOK_S}"
        answer = [server.answer]
        made: dict[bytes, bytes | None] = {}

        def kept(question: bytes, limit: int) -> bytes | None:
            """To make it takes longer than to read it, and on the same loop."""
            key = question[2:] + bytes([limit > 512])
            if key not in made:
                made[key] = answer[0](question, limit)
            told = made[key]
            return None if told is None else question[:2] + told[2:]

        server.answer = kept  # type: ignore[method-assign]
        async with followed(make_source(source)) as heard:
            await heard.until(lambda: bool(heard.members) or heard.problem is not None)
            async with GapMeter() as meter:
                words = heard.words
                await heard.until(lambda: heard.words > words + 1)
    assert meter.longest_s < MOST_S


@pytest.mark.parametrize("entry", ["as many as are read", "long names", "long values"])
async def test_the_most_entries_in_redis(tmp_path: Path, entry: str) -> None:
    if redis_server() is None:
        pytest.skip(MISSING)
    with RedisServer(tmp_path) as server:
        fill(Redis.from_url(server.url), entry)
        client = RedisClient(server.url)
        source = make_source("redis", SourceContext(client, "gaps"))
        async with GapMeter() as meter, followed(source) as heard:
            await heard.until(lambda: heard.words >= 2)
        await client.close()
    assert meter.longest_s < MOST_S


def fill(redis: Redis, entry: str) -> None:
    keys, value = EntryKeys("gaps"), b'{"role":"decode"}'
    addresses = [f"127.0.{n // 250}.{n % 250}:9" for n in range(2 * MAX_MEMBERS)]
    if entry == "long names":
        addresses = [address + "x" * 20_000 for address in addresses[:1000]]
    elif entry == "long values":
        value = b'{"role":"' + b"[" * 1_000_000
        addresses = addresses[:300]
    for at in range(0, len(addresses), 500):
        pipeline = redis.pipeline(transaction=False)
        for address in addresses[at : at + 500]:
            pipeline.sadd(keys.engines, address)
            pipeline.set(keys.entry(address), value)
        pipeline.execute()
    redis.close()
