"""Router, store and engines of two versions: an upgrade in any order costs no right answer."""

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
from tests.compatibility.test_store import Versions, start_node
from tests.fakes.redis import MISSING, RedisServer, redis_server
from tests.integration.replicas.test_processes import until_metric

from kvrouter.tools.demo.children import Child, Children
from kvrouter.tools.sim.kv_bytes import Oracle
from kvrouter.tools.sim.settings import SimSettings

pytestmark = [pytest.mark.compatibility, pytest.mark.timeout(400)]
PARTS = ("router", "store", "prefill", "decode")
SIM = SimSettings(model="m")
PROMPT_TOKENS, ANSWER_TOKENS = 40 * SIM.block_size, 4
PATIENCE_S = 60.0


async def start_fleet(
    children: Children, versions: Versions, folder: Path, upgraded: set[str]
) -> tuple[Child, Child]:
    """A router before one prefill and one decode engine that share a store; router and decode."""
    of = {part: versions["today's" if part in upgraded else "earlier"] for part in PARTS}
    store = await start_node(children, of["store"], folder)
    flags = ("--port", "0", "--model", "m", "--store", store.urls["kv"])
    prefill, decode = [
        await children.start(role, "sim", "--role", role, *flags, program=of[role].kvrouter)
        for role in ("prefill", "decode")
    ]
    engines = ("--prefill", prefill.http, "--decode", decode.http, "--store", store.urls["kv"])
    router = await children.start(
        "router", "serve", "--port", "0", *engines, program=of["router"].kvrouter
    )
    return router, decode


async def ask(http: aiohttp.ClientSession, router: Child, prompt: list[int]) -> str:
    """The text of an answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    async with http.post(f"{router.http}/v1/completions", json=body) as answer:
        return str((await answer.json())["choices"][0]["text"])


async def tokens_loaded(http: aiohttp.ClientSession, engine: Child) -> float:
    """How many prompt tokens the engine has loaded from the store."""
    async with http.get(f"{engine.http}/metrics") as answer:
        found = re.search(
            r"^vllm:external_prefix_cache_hits_total\S* (\S+)$", await answer.text(), re.M
        )
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    "upgraded",
    [{"store"}, {"store", "decode"}, {"store", "prefill", "decode"}, {"router"}],
    ids=lambda parts: "+".join(sorted(parts)),
)
async def test_a_fleet_answers_right_and_shares_kv_at_every_step_of_an_upgrade(
    versions: Versions, children: Children, tmp_path: Path, upgraded: set[str]
) -> None:
    oracle = Oracle(SIM.manifest)
    router, decode = await start_fleet(children, versions, tmp_path, upgraded)
    async with aiohttp.ClientSession() as http, asyncio.timeout(PATIENCE_S):
        first = 100
        while not await tokens_loaded(http, decode):  # until the router knows all of the fleet
            prompt = list(range(first, first + PROMPT_TOKENS))
            text = await ask(http, router, prompt)
            assert text == await asyncio.to_thread(oracle.text, prompt, ANSWER_TOKENS)
            first += 1  # another prompt: nothing of it is known


async def test_routers_of_two_versions_share_one_redis(
    versions: Versions, children: Children, tmp_path: Path
) -> None:
    if redis_server() is None:
        pytest.skip(MISSING)
    with RedisServer(tmp_path) as redis:
        flags = ("serve", "--port", "0", "--decode", "127.0.0.1:9", "--redis", redis.url)
        routers = [
            await children.start(f"{name}-router", *flags, program=version.kvrouter)
            for name, version in versions.items()
        ]
        async with aiohttp.ClientSession() as http:
            for router in routers:
                await until_metric(http, router, "kvrouter:replicas ", 1)
