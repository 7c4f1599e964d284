"""Router, simulated engines and store as processes, every wire to the store under TLS."""

import asyncio
import json
import ssl
import urllib.request
from pathlib import Path

import aiohttp
import pytest
from tests.fakes.certificates import Authority

from kvrouter.tools.demo.children import Child, Children
from kvrouter.tools.sim.kv_bytes import Oracle
from kvrouter.tools.sim.settings import SimSettings

pytestmark = pytest.mark.timeout(180)
SIM = SimSettings(model="tiny", block_size=16, kv_bytes_per_token=256)
ORACLE = Oracle(SIM.manifest)
PROMPT = list(range(500, 900))


async def test_a_prompt_is_prefilled_handed_over_and_decoded_under_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    node = authority.sign("127.0.0.1")
    shown = authority.client("engine.example")
    async with Children(tmp_path) as children, aiohttp.ClientSession() as session:
        store = await children.start(
            "store",
            *("store", "--port", "0", "--http-port", "0", "--memory", "64MiB"),
            *("--unix-socket", "none", "--tls-ca-file", authority.ca_file),
            *("--tls-cert-file", node.cert_file, "--tls-key-file", node.key_file),
        )
        files = ("--store-ca-file", shown.ca_file, "--store-cert-file", shown.cert_file)
        access = ("--store", store.urls["kvs"], *files, "--store-key-file", shown.key_file)
        common = ("--port", "0", "--model", "tiny", "--block-size", "16", *access)
        prefill, decode = await asyncio.gather(
            *(
                children.start(role, "sim", "--role", role, "--kv-bytes-per-token", "256", *common)
                for role in ("prefill", "decode")
            )
        )
        router = await children.start(
            "router",
            *("serve", "--port", "0", "--prefill", prefill.http, "--decode", decode.http),
            *access,
        )
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8}
        async with session.post(f"{router.http}/v1/completions", json=body) as answer:
            assert (await answer.json())["choices"][0]["text"] == ORACLE.text(PROMPT, 8)
        assert await loaded_from_store(session, decode) >= 384
        stats = await asyncio.to_thread(https_stats, store, authority)
        assert stats["bytes_in_total.tcp"] >= 24 * 16 * 256
        assert stats["landings_total.landed"] >= 1
        assert stats["tls_failures_total"] == 0


def https_stats(store: Child, authority: Authority) -> dict[str, int]:
    """The node's /stats, over HTTPS."""
    trusting = ssl.create_default_context(cafile=authority.ca_file)
    with urllib.request.urlopen(f"{store.urls['https']}/stats", context=trusting) as answer:
        stats: dict[str, int] = json.load(answer)
    return stats


async def loaded_from_store(session: aiohttp.ClientSession, engine: Child) -> int:
    """Prompt tokens that the engine loaded."""
    async with session.get(f"{engine.http}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    source = 'source="external_kv_transfer"'
    return sum(int(float(line.split()[-1])) for line in lines if source in line)
