"""LoRA adapters that simulated engines load at run time: their KV, and the router before them."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.tools.sim.conftest import LiveSim

from kvrouter.app.build import build
from kvrouter.app.settings import RouterSettings
from kvrouter_store._core import StoreServer

Start = Callable[..., LiveSim]
PROMPT = list(range(100, 200))
LOADABLE = 96


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    socket = str(tmp_path / "store.sock")
    server = StoreServer(host="127.0.0.1", port=0, unix_path=socket, pool_bytes=16 << 20)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def engine(live_sim: Start, store: StoreServer) -> Start:
    """Starts engines that use the store."""

    def start(role: str) -> LiveSim:
        url = f"kv://127.0.0.1:{store.port}"
        return live_sim(role=role, store=url, kv_bytes_per_token=256)

    return start


def change(sim: LiveSim, what: str, **body: object) -> tuple[int, str]:
    """Load or unload an adapter."""
    status, answer = sim.ask("POST", f"/v1/{what}_lora_adapter", json.dumps(body).encode())
    return status, answer.decode()


def load(path: str, *sims: LiveSim) -> None:
    for sim in sims:
        answer = change(sim, "load", lora_name="a", lora_path=path, load_inplace=True)
        assert answer == (200, "Success: LoRA adapter 'a' added successfully.")


def test_an_adapter_is_listed_and_served_until_it_is_unloaded(live_sim: Start) -> None:
    sim = live_sim()
    load("/adapters/1", sim)
    cards = json.loads(sim.ask("GET", "/v1/models")[1])["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("tiny", "tiny", None),
        ("a", "/adapters/1", "tiny"),
    ]
    assert sim.complete("hello", 1, model="a")["model"] == "a"
    assert change(sim, "unload", lora_name="a")[0] == 200
    body = json.dumps({"model": "a", "prompt": "hello"}).encode()
    assert sim.ask("POST", "/v1/completions", body)[0] == 404


@pytest.mark.parametrize(
    ("what", "body", "status", "kind"),
    [
        ("load", {"lora_name": "a"}, 400, "InvalidUserInput"),
        ("load", {"lora_name": "a", "lora_path": "/2"}, 400, "InvalidUserInput"),
        ("load", [], 400, "InvalidUserInput"),
        ("unload", {}, 400, "InvalidUserInput"),
        ("unload", {"lora_name": "b"}, 404, "NotFoundError"),
    ],
)
def test_what_vllm_refuses_is_refused(
    live_sim: Start, what: str, body: object, status: int, kind: str
) -> None:
    sim = live_sim()
    load("/1", sim)
    found, answer = sim.ask("POST", f"/v1/{what}_lora_adapter", json.dumps(body).encode())
    assert (found, json.loads(answer)["error"]["type"]) == (status, kind)


def test_kv_of_an_adapter_is_loaded_only_under_the_same_name_and_path(engine: Start) -> None:
    prefill, same, other = engine("prefill"), engine("decode"), engine("decode")
    load("/adapters/1", prefill, same)
    load("/adapters/2", other)
    prefill.complete(PROMPT, 1, model="a")
    texts = [each.text(PROMPT, 40, model="a") for each in (same, other)]
    assert texts[0] != texts[1]
    assert texts[0] == prefill.text(PROMPT, 40, model="a")
    loaded = [each.tokens_from("external_kv_transfer") for each in (same, other)]
    assert loaded == [LOADABLE, 0]
    assert same.text(PROMPT, 40) != texts[0]
    assert same.tokens_from("external_kv_transfer") == LOADABLE


class Behind:
    """A router before a prefill and a decode engine, and a client of it."""

    def __init__(self, port: int, http: aiohttp.ClientSession) -> None:
        self._port = port
        self._http = http

    async def complete(self, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": "a", "prompt": PROMPT, "max_tokens": 40, **more}
        url = f"http://127.0.0.1:{self._port}/v1/completions"
        async with self._http.post(url, json=body) as answer:
            return answer.status, await answer.json()

    async def until(self, status: int) -> dict[str, Any]:
        """The first answer with this status, and of the router's own where it is an error."""
        async with asyncio.timeout(20):
            while True:
                found, answer = await self.complete()
                own = answer.get("error", {}).get("code") in (None, "model_not_found")
                if found == status and own:
                    return answer


async def test_the_router_hands_kv_of_an_adapter_over_that_was_loaded_after_the_engines_joined(
    engine: Start, store: StoreServer
) -> None:
    prefill, decode = engine("prefill"), engine("decode")
    settings: dict[str, Any] = {
        "prefill": [f"127.0.0.1:{prefill.port}"],
        "decode": [f"127.0.0.1:{decode.port}"],
        "store": f"kv://127.0.0.1:{store.port}",
        "health_interval_s": 0.05,
        "landing_timeout_s": 20,
        "port": 0,
    }
    app = build(RouterSettings(**settings))
    try:
        async with aiohttp.ClientSession() as http:
            here = Behind(await app.start(), http)
            assert (await here.complete())[0] == 404
            await asyncio.to_thread(load, "/adapters/1", prefill)
            await asyncio.to_thread(load, "/adapters/1", decode)
            answer = await here.until(200)
            alone = await asyncio.to_thread(prefill.text, PROMPT, 40, model="a")
            assert answer["choices"][0]["text"] == alone
            await asyncio.to_thread(decode.ask, "POST", "/reset_prefix_cache")
            assert (await here.complete())[1]["choices"][0]["text"] == alone
            loaded = await asyncio.to_thread(decode.tokens_from, "external_kv_transfer")
            assert loaded >= LOADABLE
            for each in (prefill, decode):
                await asyncio.to_thread(change, each, "unload", lora_name="a")
            assert (await here.until(404))["error"]["param"] == "model"
    finally:
        await app.close()
