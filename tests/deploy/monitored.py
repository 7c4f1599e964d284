"""What the monitoring of deploy/ is tried on: a fleet that serves, fails and refuses a little."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp

from kvrouter.tools.demo.children import Child, Children, free_port

TOKEN = "a-token-of-the-store"
MODEL, LONELY, ALIAS = "demo-8b", "lonely-8b", "chat"
BLOCK = 64
KEYS = {"research": "", "batch": ", requests_per_s: 0.5, request_burst: 1"}
DOCUMENTS = 48
FAILING = ("--failure-injection-rate", "60", "--failure-types", "server_error")


@dataclass
class Fleet:
    """Its processes."""

    children: Children
    router: Child
    store: Child
    engines: list[Child]

    @property
    def targets(self) -> dict[str, list[str]]:
        """HOST:PORT of what Prometheus scrapes, by job."""
        urls = {
            "kvrouter": [self.router.http],
            "kvstore": [self.store.http],
            "engine": [engine.http for engine in self.engines],
        }
        return {job: [url.removeprefix("http://") for url in each] for job, each in urls.items()}


@contextlib.asynccontextmanager
async def fleet(folder: Path, redis: str) -> AsyncIterator[Fleet]:
    """Start it on loopback: a router with keys, an alias, a file of engines and Redis; ends it.

    The store has a tenant, a quota, a disk, a tier, and too little memory for the documents. One
    decode engine has other weights than the rest; that of `LONELY` fails most requests.
    """
    _write_files(folder)
    async with Children(folder) as children:
        store = await children.start(
            "store",
            *("store", "--port", "0", "--http-port", "0", "--memory", "16MiB", "--tier", redis),
            *("--unix-socket", str(folder / "store.sock"), "--quota", "fleet=8MiB"),
            *("--token-file", str(folder / "tokens")),
            *("--disk", str(folder / "disk"), "--disk-size", "128MiB"),
        )
        events = f"tcp://127.0.0.1:{free_port()}"
        engines = await asyncio.gather(
            _sim(children, store, events, "prefill", MODEL),
            _sim(children, store, events, "decode-0", MODEL),
            _sim(children, store, events, "decode-1", MODEL),
            _sim(children, store, events, "decode-2", MODEL, "--weights-revision", "other"),
            _sim(children, store, events, "lonely", LONELY, *FAILING),
        )
        prefill, *decode, lonely = [engine.http for engine in engines]
        (folder / "engines.yaml").write_text(f"decode: [{lonely}]\n")
        router = await children.start(
            "router",
            *("serve", "--port", "0", "--store", store.urls["kv"], "--store-token", TOKEN),
            *("--prefill", prefill, "--decode", *decode, "--kv-events-bind", events),
            *("--discovery", str(folder / "engines.yaml"), "--redis", redis),
            *("--api-key-file", str(folder / "keys.yaml"), "--model-alias", f"{ALIAS}={MODEL}"),
            *("--max-concurrent-requests", "6", "--engine-wait", "1", "--resume-streams"),
            *("--canary-sample-rate", "1", "--route-headers", "--log-level", "warning"),
        )
        yield Fleet(children, router, store, [*engines])


def _write_files(folder: Path) -> None:
    (folder / "disk").mkdir()
    (folder / "engines.yaml").write_text("decode: []\n")
    (folder / "tokens").write_text(f"fleet:{TOKEN}\n")
    (folder / "tokens").chmod(0o600)
    keys = [
        f"{name}: {{key: 'sha256:{sha256(name.encode()).hexdigest()}'{more}}}"
        for name, more in KEYS.items()
    ]
    (folder / "keys.yaml").write_text("\n".join(keys))


async def _sim(
    children: Children, store: Child, events: str, name: str, model: str, *more: str
) -> Child:
    role = "prefill" if name == "prefill" else "decode"
    return await children.start(
        name,
        *("sim", "--role", role, "--port", "0", "--model", model),
        *("--store", store.urls["kv"], "--store-token", TOKEN, "--kv-events-endpoint", events),
        *("--kv-cache-size", "64", "--prefill-time-per-token", "20us"),
        *("--inter-token-latency", "10ms", *more),
    )


@contextlib.asynccontextmanager
async def traffic(url: str, clients: int = 10) -> AsyncIterator[None]:
    """Requests of every kind, until the context ends."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as http:
        tasks = [asyncio.create_task(_client(http, random.Random(n))) for n in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _client(http: aiohttp.ClientSession, chance: random.Random) -> None:
    while True:
        document = chance.randrange(DOCUMENTS)
        prompt = [1 + (document * 7919 + i * 31) % 30000 for i in range(BLOCK * 8)]
        body = {"model": chance.choice([MODEL, ALIAS]), "prompt": prompt, "max_tokens": 24}
        body |= {"stream": chance.random() < 0.7, "temperature": 0}
        await _ask(http, "/v1/completions", body, "research")
        match chance.randrange(5):
            case 0:
                await _ask(http, "/v1/completions", {**body, "model": LONELY}, "research")
            case 1:
                await _ask(http, "/v1/completions", {**body, "model": "nobody's"}, "research")
            case 2:
                await _ask(http, "/v1/completions", body, "batch")
            case 3:
                await _ask(http, "/tokenize", {"model": MODEL, "prompt": "one"}, "research")


async def _ask(http: aiohttp.ClientSession, path: str, body: dict[str, Any], key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    with contextlib.suppress(aiohttp.ClientError):
        async with http.post(path, json=body, headers=headers) as answer:
            await answer.read()


async def break_a_stream(here: Fleet) -> None:
    """Kill an engine while it writes an answer. Another one continues it."""
    body = {"model": MODEL, "prompt": [7] * BLOCK, "max_tokens": 256, "temperature": 0}
    headers = {"authorization": "Bearer research"}
    url = f"{here.router.http}/v1/completions"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json={**body, "stream": True}, headers=headers) as answer,
    ):
        await answer.content.readany()
        writes = answer.headers["x-kvrouter-decode"]
        (engine,) = [each for each in here.engines if each.http.endswith(writes)]
        await here.children.kill(engine)
        assert b"[DONE]" in await answer.read()
