"""The queue is fair by tokens: through the router, before simulated and fake engines."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, Site, text

from kvrouter.app.build import build
from kvrouter.app.settings import RouterSettings
from kvrouter.http.server.exchange import Exchange
from kvrouter.tools.sim.serve import SimServer
from kvrouter.tools.sim.settings import Duration, SimSettings

NAMED: dict[str, Any] = {"trusted_proxies": ["127.0.0.1"], "tenant_header": "x-tenant"}
PLACES = 3
CLIENTS = 20
"""Of a tenant: so many that some wait while others read an answer and ask again."""
PATIENCE_S = 300
PROMPTS = {"short": 200, "long": 32_000}


@asynccontextmanager
async def saturated() -> AsyncIterator[str]:
    """The address of a router before two simulated engines, with few places."""
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            sim = SimServer(
                SimSettings(
                    model="m", port=0, kv_bytes_per_token=16, prefill_time_per_token=Duration(1e-7)
                )
            )
            engines.append(f"127.0.0.1:{await sim.start()}")
            stack.push_async_callback(sim.close)
        app = build(
            RouterSettings(
                decode=engines,
                port=0,
                max_concurrent_requests=PLACES,
                queue_timeout_s=PATIENCE_S,
                **NAMED,
            )
        )
        port = await app.start()
        stack.push_async_callback(app.close)
        yield f"http://127.0.0.1:{port}/v1/completions"


async def test_tenants_with_long_and_with_short_prompts_get_equally_many_tokens() -> None:
    served: Counter[str] = Counter()
    enough = 24 * PROMPTS["long"]

    async def client(tenant: str, number: int) -> None:
        body = json.dumps(
            {"model": "m", "prompt": [3 + number] * PROMPTS[tenant], "max_tokens": 1}
        ).encode()
        while served.total() < enough:
            async with http.post(url, data=body, headers={"x-tenant": tenant}) as answer:
                usage = json.loads(await answer.read())["usage"]
            served[tenant] += usage["prompt_tokens"]

    async with saturated() as url, aiohttp.ClientSession() as http:
        clients = [(tenant, number) for tenant in PROMPTS for number in range(CLIENTS)]
        tasks = [asyncio.create_task(client(*each)) for each in clients]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        shares = Counter(served)
        await asyncio.gather(*tasks)
    assert shares["long"] == pytest.approx(shares.total() / 2, rel=0.1), shares


async def one_place(site: Open) -> tuple[Site, "asyncio.Task[Any]"]:
    """A site with one place, which a request has that waits for its prefill leg."""
    here = await site(max_concurrent_requests=1, **NAMED)
    here.prefill[0].mode = "held"
    first = asyncio.create_task(here.post(text(user="first")))
    await here.prefill[0].next_began()
    return here, first


async def served(
    here: Site, first: "asyncio.Task[Any]", asked: Iterable[dict[str, Any]], path: str
) -> None:
    """Let requests wait, each of the tenant in its `user`, and then be served."""
    tasks = [first]
    for count, body in enumerate(asked, 1):
        tasks.append(asyncio.create_task(here.post(body, path, **{"x-tenant": body["user"]})))
        await until(lambda count=count: here.app.core.queue_wait.waiting == count)
    here.prefill[0].go.set()
    assert all(status == 200 for status, *_ in await asyncio.gather(*tasks))


async def test_an_answer_counts_as_long_as_it_was(site: Open) -> None:
    here, first = await one_place(site)
    writes = text(user="writes", max_tokens=1000)
    reads = text(user="reads", prompt="a" * 1200, max_tokens=1)
    await served(here, first, [writes] * 2 + [reads] * 5, "/v1/completions")
    order = [body["user"] for body in here.decode[0].requests]
    assert order == ["first", "writes", *["reads"] * 4, "writes", "reads"]


async def test_several_choices_count_as_several_requests(site: Open) -> None:
    here, first = await one_place(site)
    prompt = "a" * 400
    four, one = text(user="four", prompt=prompt, n=4), text(user="one", prompt=prompt)
    await served(here, first, [four] * 2 + [one] * 5, "/v1/completions")
    order = [body["user"] for body in here.decode[0].requests]
    assert order == ["first", "four", *["one"] * 4, "four", "one"]


async def test_other_endpoints_count_by_what_they_read(site: Open) -> None:
    here, first = await one_place(site)

    async def embed(exchange: Exchange) -> None:
        exchange.respond(200, b"{}")

    here.decode[0].pages["/v1/embeddings"] = embed
    large, small = ({"model": "m", "user": user, "input": user * 1000} for user in ("abcd", "a"))
    await served(here, first, [large] * 2 + [small] * 5, "/v1/embeddings")
    order = [json.loads(body)["user"] for _, body in here.decode[0].posted]
    assert order == ["abcd", *["a"] * 4, "abcd", "a"]
