"""The command line and the health check of vLLM's toy proxy, taken over as they are."""

import json
from pathlib import Path

import aiohttp
from tests.fakes.engine import engines
from tests.integration.router.conftest import text

from kvrouter.tools.demo.children import Children


async def test_the_toy_proxys_command_line_starts_this_router(tmp_path: Path) -> None:
    async with engines(2) as made, Children(tmp_path) as children, aiohttp.ClientSession() as http:
        prefill, decode = (engine.address.rpartition(":") for engine in made)
        router = await children.start(
            *("router", "serve", "--host", "127.0.0.1", "--port", "0"),
            *("--prefiller-hosts", prefill[0], "--prefiller-ports", prefill[2]),
            *("--decoder-hosts", decode[0], "--decoder-ports", decode[2]),
        )
        async with http.get(f"{router.http}/healthcheck") as answer:
            assert await answer.json() == {
                "status": "ok",
                "prefill_instances": 1,
                "decode_instances": 1,
            }
        async with http.post(f"{router.http}/v1/completions", data=json.dumps(text())) as answer:
            assert answer.status == 200
        assert [len(engine.requests) for engine in made] == [1, 1]


async def test_without_an_engine_that_decodes_the_health_check_fails(tmp_path: Path) -> None:
    flags = ["--decoder-ports", "1", "--engine-wait", "0", "--health-timeout-s", "0.5"]
    async with Children(tmp_path) as children, aiohttp.ClientSession() as http:
        router = await children.start("router", "serve", "--port", "0", *flags)
        async with http.get(f"{router.http}/healthcheck") as answer:
            assert answer.status == 503
            assert (await answer.json())["decode_instances"] == 0
