"""A router with `--record`: what is in the file, and what a full disk does to requests."""

import asyncio
import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

import aiohttp
from tests.fakes.engine import BLOCK_TOKENS, engines
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, chat, metric, text
from tests.integration.router.test_request_path import with_a_manifest
from tests.integration.why.planted import kvrouter
from tests.page.cluster import BLOCK, MODEL, ask, cluster

COMMAND = str(Path(sys.executable).with_name("kvrouter"))
PROMPT = list(range(100, 100 + 40 * BLOCK_TOKENS))
BLOCKS = 18
DROPPED = re.compile(r"^kvrouter:record_lines_dropped_total (.+)$", re.M)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_prompt_that_engines_got_is_a_line(site: Open, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    here = await site(policy="prefix", record=str(path), prepare=with_a_manifest)
    named = {"x-session-id": "mine"}
    assert (await here.post(text(prompt=PROMPT), **named))[0] == 200
    assert (await here.post(text(prompt=[*PROMPT, 7], stream=True), **named))[0] == 200
    assert (await here.post(chat(), "/v1/chat/completions"))[0] == 200
    assert (await here.post(text(prompt=[PROMPT, PROMPT[:20]])))[0] == 200
    assert (await here.post(text(model="none")))[0] == 404
    await until(lambda: path.read_bytes().count(b"\n") == 5)
    first, second, chatted, *both = lines(path)
    assert (first["input_length"], first["output_length"], first["outcome"]) == (640, 4, "length")
    assert first["hash_ids"][0] == second["hash_ids"][0] == both[0]["hash_ids"][0]
    assert first["hash_ids"] == both[0]["hash_ids"] != second["hash_ids"]
    assert first["session"] == second["session"] is not None
    assert chatted["session"] is None
    assert first["timestamp"] <= second["timestamp"]
    assert first["ttft_ms"] <= first["total_ms"]
    assert "mine" not in path.read_text()
    assert await metric(here, "kvrouter:record_lines_dropped_total") == 0


async def test_a_client_that_leaves_is_recorded_with_what_it_got(
    site: Open, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    here = await site(policy="prefix", record=str(path))
    here.decode[0].mode = "hang_mid"
    body = text(prompt=PROMPT, stream=True)
    async with here.http.post(here.url("/v1/completions"), json=body) as answer:
        await answer.content.readany()
    await until(lambda: path.read_bytes().count(b"\n") == 1)
    assert lines(path)[0]["outcome"] == "client_left"


async def test_the_record_keeps_its_bound(site: Open, tmp_path: Path) -> None:
    path, most = tmp_path / "trace.jsonl", 1 << 16
    here = await site(policy="prefix", record=str(path), record_max_bytes=most)
    older = path.with_name("trace.jsonl.1")
    while not older.exists():
        assert (await here.post(text(prompt=PROMPT)))[0] == 200
    await until(path.exists)
    assert lines(older)
    assert max(path.stat().st_size, older.stat().st_size) <= most // 2


async def test_without_it_no_file_is_written(site: Open, tmp_path: Path) -> None:
    here = await site(policy="prefix")
    assert (await here.post(text(prompt=PROMPT)))[0] == 200
    assert list(tmp_path.iterdir()) == []


async def test_a_full_disk_costs_lines_and_no_request(tmp_path: Path) -> None:
    path, dropped = tmp_path / "trace.jsonl", False
    async with engines(1) as [decode], aiohttp.ClientSession() as http:
        router = await asyncio.create_subprocess_exec(
            *(COMMAND, "serve", "--port", "0", "--decode", decode.address),
            *("--record", str(path), "--log-level", "warning"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert router.stdout is not None
            assert router.stderr is not None
            async with asyncio.timeout(60):
                url = (await router.stdout.readline()).decode().rsplit(" ", 1)[1].strip()
                while not dropped:
                    async with http.post(f"{url}/v1/completions", json=text()) as answer:
                        assert answer.status == 200
                    if full := path.stat().st_size:
                        resource.prlimit(router.pid, resource.RLIMIT_FSIZE, (full, full))
                    async with http.get(f"{url}/metrics") as answer:
                        found = DROPPED.search(await answer.text())
                    dropped = found is not None and float(found[1]) > 0
                router.terminate()
                said = (await router.stderr.read()).decode()
                assert await router.wait() == 0
        finally:
            if router.returncode is None:
                router.kill()
                await router.wait()
    assert said.count("--record") == 1
    assert "File too large" in said
    assert lines(path)  # each of them whole


async def test_a_file_that_cannot_be_opened_keeps_the_router_from_starting(
    tmp_path: Path,
) -> None:
    router = await asyncio.create_subprocess_exec(
        *(COMMAND, "serve", "--port", "0", "--decode", "127.0.0.1:1"),
        *("--record", str(tmp_path / "none" / "trace.jsonl"), "--log-level", "warning"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await router.communicate()
    assert router.returncode == 1
    # Beside lines of the log, which a thread writes.
    assert "none/trace.jsonl: No such file or directory\n" in said.decode()


async def test_the_control_port_tells_what_a_store_of_any_size_would_find(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, prefill=1, decode=1) as here,
        aiohttp.ClientSession() as http,
    ):

        async def told(path: str) -> Any:
            async with http.get(here.page + path) as answer:
                return await answer.json(content_type=None)

        assert (await told("/status.json"))["store_sizes"] == {}
        assert (await told("/store-size?bytes=1"))["found"] is None
        command = "why", "--store-size", "1TiB", "--url", here.page
        assert "No prompt has been counted yet" in (await kvrouter(*command))[1]
        for _ in range(2):
            prompts = ([own * 1000 + n for n in range(1, BLOCKS * BLOCK)] for own in range(20))
            bodies = ({"model": MODEL, "prompt": each, "max_tokens": 2} for each in prompts)
            asking = (ask(http, here.router.http, body) for body in bodies)
            assert await asyncio.gather(*asking) == [200] * 20

        async with http.get(f"{here.page}/metrics") as answer:  # counts all that has ended
            assert "kvrouter:store_size_found_ratio{store_bytes=" in await answer.text()
        sizes = (await told("/status.json"))["store_sizes"]
        assert max(map(int, sizes)) < 4 * 20 * BLOCKS * BLOCK * 512  # bytes of KV per token
        assert 0.2 < max(sizes.values()) < 0.8  # of some twenty sampled blocks
        found = await told(f"/store-size?bytes={1 << 40}")
        assert found["store_bytes"] == 1 << 40
        assert found["found"] == max(sizes.values())
        share = f"{found['found']:.1%}"
        assert (await kvrouter(*command))[1] == f"A store of 1.0TiB finds {share} of the tokens.\n"
        assert "bytes" in (await told("/store-size?bytes=much"))["error"]["message"]
