"""The health check of vLLM's toy proxy, answered as there."""

from pathlib import Path

import aiohttp
from tests.fakes.engine import engines

from kvrouter.tools.demo.children import Children


async def test_the_health_check_counts_the_engines_of_each_leg(tmp_path: Path) -> None:
    async with engines(2) as made, Children(tmp_path) as children, aiohttp.ClientSession() as http:
        prefill, decode = (engine.address for engine in made)
        router = await children.start(
            *("router", "serve", "--host", "127.0.0.1", "--port", "0"),
            *("--prefill", prefill, "--decode", decode),
        )
        async with http.get(f"{router.http}/healthcheck") as answer:
            assert await answer.json() == {
                "status": "ok",
                "prefill_instances": 1,
                "decode_instances": 1,
            }


async def test_without_an_engine_that_decodes_the_health_check_fails(tmp_path: Path) -> None:
    flags = ["--decode", "127.0.0.1:1", "--engine-wait", "0", "--health-timeout", "0.5"]
    async with Children(tmp_path) as children, aiohttp.ClientSession() as http:
        router = await children.start("router", "serve", "--port", "0", *flags)
        async with http.get(f"{router.http}/healthcheck") as answer:
            assert answer.status == 503
            assert (await answer.json())["decode_instances"] == 0
