"""The drill's processes: a store, simulated engines and a router.

The router reaches some of them over links that can be cut and stalled.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from tests.chaos.gauges import engine_gauges, router_gauges, store_gauges
from tests.fakes.link import Link

from kvrouter.tools.demo.children import Child, Children

PATIENCE_S = 20.0
MODEL = "tiny"
BLOCK_TOKENS = 16
KV_BYTES_PER_TOKEN = 256
ROLES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
LINKED = ("prefill-1", "decode-1")
"""Engines that the router, and the store, reach over links."""
REQUEST_TIMEOUT_S = 10.0
"""Longer than an engine may be silent: one that is late and lives ends the request."""
ADMIN_JSON = {"content-type": "application/json"}


@dataclass
class SimEngine:
    """One engine: its process, and its address for the router."""

    name: str
    role: str
    child: Child
    link: Link | None
    starts: int = 1

    @property
    def port(self) -> int:
        """The port of its process."""
        return int(self.child.http.rpartition(":")[2])

    @property
    def address(self) -> str:
        """HOST:PORT in the router's list."""
        if self.link is None:
            return f"127.0.0.1:{self.port}"
        return self.link.url.removeprefix("kv://")


class Cluster:
    """All processes; an async context that ends them."""

    def __init__(self, folder: Path, children: Children, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.engines: dict[str, SimEngine] = {}
        self.store: Child
        self.router: Child
        self.store_link: Link
        self._folder = folder
        self._children = children
        self._links = ExitStack()
        self._store_starts = 0

    async def start(self) -> None:
        """Start all; returns when every engine has joined."""
        await self.start_store("0")
        self.store_link = self._linked(self.store.urls["kv"])
        started = await asyncio.gather(*(self._sim(name, "0") for name in ROLES))
        for name, child in zip(ROLES, started, strict=True):
            link = self._linked(child.http) if name in LINKED else None
            self.engines[name] = SimEngine(name, ROLES[name], child, link)
        named = {
            role: [e.address for e in self.engines.values() if e.role == role]
            for role in ("prefill", "decode")
        }
        self.router = await self._children.start(
            "router",
            *("serve", "--port", "0", "--admin", "--store", self.store_link.url),
            *("--prefill", *named["prefill"], "--decode", *named["decode"]),
            *("--request-timeout", str(REQUEST_TIMEOUT_S), "--health-interval", "0.5"),
            *("--health-timeout", "1", "--log-level", "warning", "--resume-streams"),
        )
        for name in ROLES:
            await self.joined(name)

    def close(self) -> None:
        """Close the links."""
        self._links.close()

    # -- what the drill does to them

    async def kill(self, name: str) -> None:
        """SIGKILL one engine."""
        await self._children.kill(self.engines[name].child)

    async def restart(self, name: str) -> None:
        """Start a dead engine again, at its address."""
        engine = self.engines[name]
        engine.starts += 1
        engine.child = await self._sim(name, str(engine.port), engine.starts)

    async def roll(self, name: str) -> None:
        """Restart one engine as in `docs/operations.md`: drain it, then add it again."""
        engine = self.engines[name]
        url = f"{self.router.http}/workers"
        async with self.http.delete(f"{url}/{engine.address}") as answer:
            assert answer.status in (200, 202), await answer.text()
        await self._until(lambda: self._gone(engine))
        engine.child.process.terminate()
        await engine.child.process.wait()
        engine.child.killed = True
        await self.restart(name)
        await self._add(name)

    async def cut(self, name: str) -> None:
        """Remove one engine by force during its legs, and add it again."""
        engine = self.engines[name]
        url = f"{self.router.http}/workers/{engine.address}?force=true"
        async with self.http.delete(url) as answer:
            assert answer.status == 200, await answer.text()
        assert await self._gone(engine)
        await self._add(name)

    async def _add(self, name: str) -> None:
        engine = self.engines[name]
        body = {"url": f"http://{engine.address}", "worker_type": engine.role}
        url = f"{self.router.http}/workers"
        async with self.http.post(url, data=json.dumps(body), headers=ADMIN_JSON) as answer:
            assert answer.status == 202, await answer.text()
        await self.joined(name)

    async def kill_store(self) -> None:
        """SIGKILL the store."""
        await self._children.kill(self.store)

    async def start_store(self, port: str | None = None) -> None:
        """Start the store, by default at its address."""
        port = port or self.store.urls["kv"].rpartition(":")[2]
        self._store_starts += 1
        self.store = await self._children.start(
            f"store-{self._store_starts}",
            *("store", "--port", port, "--http-port", "0", "--memory", "64MiB"),
            *("--unix-socket", str(self._folder / "store.sock")),
        )

    async def joined(self, name: str) -> None:
        """Return when the router can use that engine."""
        await self._until(lambda: self._is_up(self.engines[name]))

    # -- what is asked of them

    async def gauges(self) -> dict[str, float]:
        """What must be back at its first value in the end."""
        found = await router_gauges(self.http, self.router)
        found |= await store_gauges(self.http, self.store.http)
        for name, engine in self.engines.items():
            found |= await engine_gauges(self.http, name, engine.child.http)
        return found

    def unexpected_deaths(self) -> list[str]:
        """Processes that ended by themselves."""
        return [
            f"{name} ended by itself"
            for name in self._children.unexpected_deaths()
            if not name.startswith("nobody")
        ]

    # -- inside

    async def _sim(self, name: str, port: str, start: int = 1) -> Child:
        over_link = name in LINKED
        return await self._children.start(
            f"{name}-{start}",
            *("sim", "--role", ROLES[name], "--port", port, "--model", MODEL),
            *("--block-size", str(BLOCK_TOKENS), "--kv-bytes-per-token", str(KV_BYTES_PER_TOKEN)),
            *("--store", self.store_link.url if over_link else self.store.urls["kv"]),
            *("--store-transport", "tcp" if over_link else "auto", "--store-deadline", "500ms"),
            *("--kv-cache-size", "4096", "--inter-token-latency", "10ms"),
            *("--prefill-time-per-token", "200us"),
        )

    def _linked(self, url: str) -> Link:
        host, port = url.rpartition("//")[2].split(":")
        return self._links.enter_context(Link((host, int(port))))

    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():
                await asyncio.sleep(0.05)

    async def _is_up(self, engine: SimEngine) -> bool:
        url = f"{self.router.http}/workers/{engine.address}"
        async with self.http.get(url) as answer:
            card = await answer.json()
        return answer.status == 200 and card["status"] == "up"

    async def _gone(self, engine: SimEngine) -> bool:
        url = f"{self.router.http}/workers/{engine.address}"
        async with self.http.get(url) as answer:
            return answer.status == 404
