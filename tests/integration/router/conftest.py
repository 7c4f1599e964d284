"""A whole router before fake engines, and a client for it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.fakes.engine import FakeEngine, engines
from tests.fakes.store import StoreProcess
from tests.integration.router.ahead import MANIFEST, await_stat, waiting

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings
from kvrouter_store.client.blocking import StoreClient

Json = dict[str, Any]
DEFAULTS: Json = {"policy": "round_robin", "engine_wait_s": 0.0, "health_interval_s": 0.05}


@dataclass
class Site:
    """A router, its engines and a client.

    Ends only well if nothing of any request is left behind.
    """

    app: App
    port: int
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    http: aiohttp.ClientSession
    more: list[FakeEngine] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def post(
        self, body: Json | bytes, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url(path), data=data, headers=headers) as answer:
            fields = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, fields, await answer.read()

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self.http.get(self.url(path)) as answer:
            return answer.status, await answer.read()


Open = Callable[..., Awaitable[Site]]


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Open]:
    """Opens one site: `prefill` and `decode` engines, and settings of the router, its `lines`.

    `addresses` of engines of both kinds, where they are others than those; `kind` of the engines.
    """
    opened: list[Site] = []
    held = []

    async def open_site(prefill: int = 1, decode: int = 1, **settings: Any) -> Site:
        context = engines(prefill + decode, kind=settings.pop("kind", FakeEngine))
        made = await context.__aenter__()
        held.append(context)
        prepare, lines = settings.pop("prepare", None), settings.pop("lines", None)
        if prepare is not None:
            prepare(made)
        both = [e.address for e in made[:prefill]], [e.address for e in made[prefill:]]
        addresses = settings.pop("addresses", both)
        app = build(
            RouterSettings(
                prefill=addresses[0],
                decode=addresses[1],
                port=0,
                **{**DEFAULTS, **settings},
            ),
            lines,
        )
        port = await app.start()
        site = Site(app, port, made[:prefill], made[prefill:], aiohttp.ClientSession())
        opened.append(site)
        return site

    yield open_site
    for each in opened:
        await each.http.close()
        await each.app.close()
        assert each.app.core.metrics.running == 0
        assert all(
            e.legs == e.requests == e.tokens == e.computing_tokens == e.prefilling.legs == 0
            for e in each.app.core.pool.all()
        )
    for context in held:
        await context.__aexit__(None, None, None)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StoreProcess]:
    """A store in which a manifest is registered."""
    with StoreProcess(tmp_path) as started:
        with StoreClient(started.url) as client:
            client.register(MANIFEST)
        yield started


@pytest_asyncio.fixture
async def ahead(site: Open, node: StoreProcess) -> AsyncIterator[Open]:
    """Opens sites before that store whose engines answer when a test says so."""

    async def open_site(mode: str, *counts: int, **settings: Any) -> Site:
        settings = {"landing_timeout_s": 30, "prepare": waiting, **settings}
        return await site(*counts, store=node.url, decode_dispatch=mode, **settings)

    yield open_site
    for name in ("waits", "leases"):
        await asyncio.to_thread(await_stat, node, name, 0)


def text(**more: Any) -> Json:
    return {"model": "m", "prompt": "Hello, you there", "max_tokens": 4, **more}


def chat(**more: Any) -> Json:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "m", "messages": messages, "max_tokens": 4, **more}


async def metric(here: Site, line: str) -> float:
    _, body = await here.get("/metrics")
    found = [row for row in body.decode().splitlines() if row.startswith(line)]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0
