"""Two routers as processes, of which one is killed under its requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
from tests.fakes.engine import FakeEngine, engines
from tests.fakes.patience import until
from tests.fakes.redis import RedisServer

from kvrouter.tools.demo.children import Child, Children

PATIENCE_S = 30.0
BODY = {"model": "m", "prompt": "Hello", "max_tokens": 4}


@asynccontextmanager
async def two_routers(
    folder: Path, redis: RedisServer, *decode: FakeEngine
) -> AsyncIterator[tuple[Children, Child, Child]]:
    async with Children(folder) as children:
        named = [flag for each in decode for flag in ("--decode", each.address)]
        one, two = [
            await children.start(
                f"router-{k}",
                *("serve", "--port", "0", *named, "--redis", redis.url, "--log-level", "warning"),
            )
            for k in (1, 2)
        ]
        yield children, one, two


async def until_metric(
    http: aiohttp.ClientSession, router: Child, line: str, value: float | None
) -> None:
    """Returns once the series has that value; None: any but 0."""

    async def has_it() -> bool:
        async with http.get(f"{router.http}/metrics") as answer:
            page = await answer.text()
        rows = [row for row in page.splitlines() if row.startswith(line)]
        found = float(rows[0].rsplit(" ", 1)[1]) if rows else 0.0
        return found == value or (value is None and found != 0)

    await until(has_it, PATIENCE_S, look_s=0.05)


async def test_of_a_router_that_is_killed_nothing_is_lost_but_its_open_streams(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with (
        engines(2) as (d, e),
        two_routers(tmp_path, redis, d, e) as (children, one, two),
        aiohttp.ClientSession() as http,
    ):
        url = f"{one.http}/v1/completions"
        elsewhere = f'kvrouter:worker_tokens_elsewhere{{engine="{d.address}"}}'
        await until_metric(http, one, "kvrouter:replicas ", 1)
        d.mode = e.mode = "hang_mid"
        stream = {**BODY, "stream": True, "prompt": "Hello " * 50}
        async with http.post(f"{two.http}/v1/completions", json=stream) as broken:
            await broken.content.readline()
            busy = d if d.requests else e
            elsewhere = f'kvrouter:worker_tokens_elsewhere{{engine="{busy.address}"}}'
            await until_metric(http, one, elsewhere, None)
            d.mode = e.mode = "held"
            under_way = [asyncio.create_task(status(http, url)) for _ in range(6)]
            await until(lambda: len(d.requests) + len(e.requests) >= 7, PATIENCE_S)
            await children.kill(two)
            with suppress(aiohttp.ClientError):
                await broken.content.read()
        d.go.set()
        e.go.set()
        assert await asyncio.gather(*under_way) == [200] * 6
        await until_metric(http, one, elsewhere, 0)
        await until_metric(http, one, "kvrouter:replicas ", 0)
        d.mode = e.mode = "ok"
        assert [await status(http, url) for _ in range(4)] == [200] * 4


async def status(http: aiohttp.ClientSession, url: str) -> int:
    async with http.post(url, json=BODY) as answer:
        await answer.read()
        return answer.status
