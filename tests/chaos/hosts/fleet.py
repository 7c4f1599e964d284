"""What runs on the hosts of the drill, and at the hub between them.

On each host: a node of the store, a prefill and a decode engine (simulated), and a storage process
of Mooncake. At the hub: the router, Mooncake's master, and Redis.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
from tests.chaos.cluster import BLOCK_TOKENS, KV_BYTES_PER_TOKEN, MODEL, REQUEST_TIMEOUT_S
from tests.chaos.gauges import (
    engine_gauges,
    metrics_page,
    router_gauges,
    store_gauges,
    total,
)
from tests.chaos.hosts.hits import HitRates
from tests.chaos.hosts.namespaces import HUB, Host
from tests.fakes.mooncake import MooncakeMaster, MooncakeNode
from tests.fakes.redis import RedisServer

from kvrouter.tools.demo.children import KVROUTER, Child, Children

START_S = 60.0
ANSWER_S = 0.4
"""For a process that is asked how it goes; one behind a cut link does not answer."""
NODE_PORT, NODE_HTTP_PORT = 7400, 7480
ENGINE_PORTS = {"prefill": 8001, "decode": 8002}
CACHE_BLOCKS = {"prefill": 96, "decode": 512}
"""So few that prefill engines mostly find a prefix in the store alone."""
REDIS_OPTIONS = {"protected-mode": "no", "maxmemory": "128mb", "maxmemory-policy": "allkeys-lru"}


def node_url(host: Host) -> str:
    """The node of a host, for others."""
    return f"kv://{host.address}:{NODE_PORT}"


class Fleet:
    """All processes. `children` ends its own; `close` ends Mooncake and Redis.

    Args:
        site: folder of Mooncake's package.
    """

    def __init__(
        self,
        folder: Path,
        children: Children,
        http: aiohttp.ClientSession,
        hosts: Sequence[Host],
        site: Path,
    ) -> None:
        self.hosts = hosts
        self.router: Child
        self.nodes: dict[str, Child] = {}
        self.engines: dict[str, Child] = {}
        self.master = MooncakeMaster(folder / "mooncake-master.log", site, HUB)
        self.storage = {
            host.name: MooncakeNode(
                folder / f"mooncake-{host.name}.log",
                site,
                self.master.address,
                host.address,
                python=host.within(sys.executable),
            )
            for host in hosts
        }
        options = (word for name, value in REDIS_OPTIONS.items() for word in (f"--{name}", value))
        self.redis = RedisServer(folder, *options, host=HUB)
        # So it loses no block with one storage process.
        self._tier = f"mooncake://{self.master.address}?replicas=2"
        self._children = children
        self._http = http
        self._starts = 0

    async def start(self) -> None:
        """Start all, with nodes over Mooncake; returns when all is well."""
        await asyncio.to_thread(self.master.start)
        storage = [asyncio.to_thread(each.start) for each in self.storage.values()]
        await asyncio.gather(*storage, asyncio.to_thread(self.redis.start))
        await asyncio.gather(*map(self.start_node, self.hosts))
        places = [(host, role) for host in self.hosts for role in ENGINE_PORTS]
        await asyncio.gather(*(self._start_engine(*place) for place in places))
        self.router = await self._children.start(
            "router",
            *("serve", "--port", "0", "--store", *map(node_url, self.hosts)),
            *(word for role in ENGINE_PORTS for word in (f"--{role}", *self._addresses(role))),
            *("--request-timeout", str(REQUEST_TIMEOUT_S), "--health-interval", "0.5"),
            *("--health-timeout", "1", "--log-level", "warning", "--resume-streams"),
            start_s=START_S,
        )
        async with asyncio.timeout(START_S):
            while not await self.is_well():
                await asyncio.sleep(0.1)

    def close(self) -> None:
        """End what `children` does not end."""
        for each in (*self.storage.values(), self.master):
            each.kill()
        self.redis.kill()

    # -- what the drill does to them

    async def start_node(self, host: Host) -> None:
        """Start the node of a host, where it was."""
        self._starts += 1
        self.nodes[host.name] = await self._children.start(
            f"node-{host.name}-{self._starts}",
            *("store", "--host", host.address, "--insecure", "--unix-socket", host.socket),
            *("--port", str(NODE_PORT), "--http-port", str(NODE_HTTP_PORT)),
            *("--memory", "4MiB", "--granule", "4KiB", "--tier-memory", "4MiB"),
            *("--tier", self._tier),
            program=host.within(*KVROUTER),
            start_s=START_S,
        )

    async def kill_node(self, host: Host) -> None:
        """SIGKILL the node of a host."""
        await self._children.kill(self.nodes[host.name])

    async def move_to_redis(self) -> None:
        """Restart one node after the other, over Redis in place of Mooncake."""
        self._tier = self.redis.url
        for host in self.hosts:
            node = self.nodes[host.name]
            node.process.terminate()
            await node.process.wait()
            node.killed = True
            await self.start_node(host)

    # -- who sees what; each gives one bool for each observer

    async def sees_node(self, host: Host) -> list[bool]:
        """Whether the router is connected to a node."""
        return [not any(node_url(host) in each for each in await self.lacking())]

    async def sees_tier(self) -> list[bool]:
        """Of each node that answers, whether it uses its tier."""
        pages = await asyncio.gather(*(self._text(f"{u}/metrics") for u in self._nodes().values()))
        return [total(page, "kvstore:tier_up") == 1 for page in pages if page]

    async def sees_storage(self, host: Host) -> list[bool]:
        """Whether Mooncake's master knows the storage process of a host."""
        return [f"{host.address}:" in await self._text(self.master.segments_url)]

    async def lacking(self) -> list[str]:
        """What the router lacks, in sentences."""
        async with self._http.get(f"{self.router.http}/health") as answer:
            return list((await answer.json(content_type=None)).get("lacking", ()))

    async def is_well(self) -> bool:
        """Whether everything is there, and everybody knows."""
        seen = await self.sees_tier()
        if self._tier != self.redis.url:
            for host in self.hosts:
                seen += await self.sees_storage(host)
        return all(seen) and not await self.lacking()

    # -- counters and gauges

    async def count_hits(self, rates: HitRates) -> None:
        """Add what nodes and prefill engines count to the sums."""

        async def node(host: str, url: str) -> None:
            page = await self._text(f"{url}/metrics")
            found = total(page, "kvstore:hits_total", 'tier="remote"')
            asked = found + total(page, "kvstore:misses_total", 'tier="remote"')
            if page:
                rates.take(f"node {host}", {"tier asked": asked, "tier found": found})

        async def engine(name: str, url: str) -> None:
            page = await self._text(f"{url}/metrics")
            asked = total(page, "vllm:external_prefix_cache_queries_total")
            found = total(page, "vllm:external_prefix_cache_hits_total")
            if page:
                rates.take(name, {"store asked": asked, "store found": found})

        prefill = {n: c.http for n, c in self.engines.items() if n.startswith("prefill")}
        counts = [node(*each) for each in self._nodes().items()]
        await asyncio.gather(*counts, *(engine(*each) for each in prefill.items()))

    async def gauges(self) -> dict[str, float]:
        """What must be back at its first value in the end."""
        found = await router_gauges(self._http, self.router)
        for name, url in self._nodes().items():
            found |= await store_gauges(self._http, url, f"node {name}")
        for name, engine in self.engines.items():
            found |= await engine_gauges(self._http, name, engine.http)
        return found

    async def wrong_blocks(self) -> int:
        """How many blocks engines have loaded with wrong bytes."""
        pages = [await metrics_page(self._http, each.http) for each in self.engines.values()]
        return int(sum(total(page, "kvsim:wrong_blocks_total") for page in pages))

    # -- inside

    async def _start_engine(self, host: Host, role: str) -> None:
        neighbours = [each for each in self.hosts if each != host]
        self.engines[f"{role} {host.name}"] = await self._children.start(
            f"{role}-{host.name}",
            *("sim", "--role", role, "--host", host.address, "--port", str(ENGINE_PORTS[role])),
            *("--model", MODEL, "--block-size", str(BLOCK_TOKENS)),
            *("--kv-bytes-per-token", str(KV_BYTES_PER_TOKEN)),
            *("--kv-cache-size", str(CACHE_BLOCKS[role])),
            *("--store", node_url(host), "--store-deadline", "500ms"),
            *("--store-neighbours", ",".join(map(node_url, neighbours))),
            *("--inter-token-latency", "10ms", "--prefill-time-per-token", "200us"),
            program=host.within(*KVROUTER),
            start_s=START_S,
        )

    def _addresses(self, role: str) -> list[str]:
        return [f"{host.address}:{ENGINE_PORTS[role]}" for host in self.hosts]

    def _nodes(self) -> dict[str, str]:
        return {host.name: f"http://{host.address}:{NODE_HTTP_PORT}" for host in self.hosts}

    async def _text(self, url: str) -> str:
        """What a process answers; '' where it does not."""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(ANSWER_S), self._http.get(url) as answer:
                return await answer.text()
        return ""
