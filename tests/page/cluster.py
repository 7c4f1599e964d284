"""What the page is shown before: a store, simulated engines, a router with its page, and load."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvrouter.tools.demo.children import Child, Children, free_port

MODEL = "demo-8b"
BLOCK = 64


@dataclass
class Cluster:
    """All of it, running."""

    children: Children
    store: Child
    engines: dict[str, Child]
    router: Child
    page: str

    def address(self, name: str) -> str:
        """HOST:PORT of an engine."""
        return self.engines[name].http.removeprefix("http://")


@contextlib.asynccontextmanager
async def cluster(
    folder: Path,
    *,
    prefill: int = 2,
    decode: int = 2,
    ports: Sequence[int] = (),
    disk: bool = False,
) -> AsyncIterator[Cluster]:
    """Start all of it on loopback; ends all of it.

    Args:
        folder: for logs, and what is on the disk.
        prefill: how many engines.
        decode: how many engines.
        ports: of the engines; free ones where there are none.
        disk: whether the store has an SSD tier.
    """
    async with Children(folder) as children:
        tier: tuple[str, ...] = ()
        if disk:
            (folder / "tier").mkdir()
            tier = ("--disk", str(folder / "tier"), "--disk-size", "256MiB")
        store = await children.start(
            "store",
            *("store", "--port", "0", "--http-port", "0", "--memory", "96MiB"),
            *("--unix-socket", str(folder / "store.sock"), *tier),
        )
        events = f"tcp://127.0.0.1:{free_port()}"
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        wanted = [*ports] or [0] * len(names)
        started = await asyncio.gather(
            *(
                sim(children, name, port, store, events)
                for name, port in zip(names, wanted, strict=True)
            )
        )
        labelled = [f"{name}={each.http}" for name, each in zip(names, started, strict=True)]
        page_port = free_port()
        router = await children.start(
            "router",
            *("serve", "--port", "0", "--store", store.urls["kv"], "--kv-events-bind", events),
            *("--prefill", *labelled[:prefill]),
            *("--decode", *labelled[prefill:]),
            *("--control-port", str(page_port), "--health-interval", "0.5"),
            *(
                "--health-timeout",
                "2",
                "--max-concurrent-requests",
                "48",
                "--log-level",
                "warning",
            ),
        )
        engines = dict(zip(names, started, strict=True))
        yield Cluster(children, store, engines, router, f"http://127.0.0.1:{page_port}")


async def sim(children: Children, name: str, port: int, store: Child, events: str) -> Child:
    """One simulated engine."""
    return await children.start(
        f"{name}-{port}" if port else name,
        *("sim", "--role", name.split("-", maxsplit=1)[0], "--port", str(port), "--model", MODEL),
        *("--store", store.urls["kv"], "--kv-events-endpoint", events),
        *("--kv-cache-size", "160", "--kv-bytes-per-token", "512"),
        *("--inter-token-latency", "18ms", "--prefill-time-per-token", "250us"),
    )


@contextlib.asynccontextmanager
async def load(url: str, clients: int, seed: int = 7) -> AsyncIterator[None]:
    """Conversations over a few documents, `clients` at a time, until the context ends."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        tasks = [
            asyncio.create_task(_client(http, url, random.Random(seed + i))) for i in range(clients)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _client(http: aiohttp.ClientSession, url: str, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(chance.expovariate(4.0))
        document = int(chance.paretovariate(0.9)) % 40
        prompt = [
            1 + (document * 7919 + i * 31) % 30000 for i in range(BLOCK * (6 + document % 12))
        ]
        for _ in range(chance.randint(1, 4)):
            prompt += [chance.randrange(1, 30000) for _ in range(chance.randint(20, 160))]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": chance.randint(12, 160)}
            with contextlib.suppress(aiohttp.ClientError):
                await ask(http, url, body | {"stream": chance.random() < 0.97})


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any], **headers: str) -> int:
    """One completion, read to its end; its status."""
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer.status
