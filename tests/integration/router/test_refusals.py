"""What engines refuse, clients of the router are refused in the same words."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.fakes.openai_cases import CHAT, COMPLETIONS

from kvrouter.app.build import build
from kvrouter.app.settings import RouterSettings
from kvrouter.tools.sim.serve import SimServer
from kvrouter.tools.sim.settings import SimSettings

MAX_MODEL_LEN = 64
SIM = SimSettings(model="tiny", port=0, block_size=16, max_model_len=MAX_MODEL_LEN)
Json = dict[str, Any]


class Pools:
    """A router that tokenises before engines that keep vLLM's rules, and one of these alone."""

    def __init__(self, http: aiohttp.ClientSession, router: int, engine: int) -> None:
        self._http = http
        self._ports = router, engine

    async def both(self, path: str, body: Json) -> list[tuple[int, Json]]:
        """The router's answer and the engine's own."""
        answers = []
        for port in self._ports:
            url = f"http://127.0.0.1:{port}{path}"
            async with self._http.post(url, json={"model": "tiny", **body}) as answer:
                answers.append((answer.status, json.loads(await answer.read())))
        return answers


@pytest_asyncio.fixture(params=[1, 0], ids=["both legs", "decode alone"])
async def pools(request: pytest.FixtureRequest) -> AsyncIterator[Pools]:
    sims = [SimServer(SIM) for _ in range(2)]
    ports = [await sim.start() for sim in sims]
    prefill, decode = f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"
    settings = RouterSettings(
        prefill=[prefill][: request.param], decode=[decode], port=0, policy="prefix"
    )
    app = build(settings, None)
    port = await app.start()
    async with aiohttp.ClientSession() as http:
        yield Pools(http, port, ports[1])
    await app.close()
    for sim in sims:
        await sim.close()


def said(text: str) -> Json:
    return {"messages": [{"role": "user", "content": text}]}


LONG = [
    pytest.param(COMPLETIONS, {"prompt": [7] * (MAX_MODEL_LEN + 9)}, "input_tokens", id="ids"),
    pytest.param(COMPLETIONS, {"prompt": "7 " * (MAX_MODEL_LEN + 9)}, "input_tokens", id="text"),
    pytest.param(COMPLETIONS, {"prompt": [7] * MAX_MODEL_LEN}, "max_tokens", id="no room"),
    pytest.param(CHAT, said("7 " * (MAX_MODEL_LEN + 9)), "input_tokens", id="chat"),
    pytest.param(
        CHAT, {**said("7 " * 99), "max_tokens": 5}, "input_tokens", id="chat with a limit"
    ),
    pytest.param(CHAT, {**said("7 " * 99), "stream": True}, "input_tokens", id="chat stream"),
]


@pytest.mark.parametrize(("path", "body", "param"), LONG)
async def test_a_prompt_that_is_too_long_is_refused_in_the_engines_words(
    pools: Pools, path: str, body: Json, param: str
) -> None:
    (status, refusal), (own_status, own) = await pools.both(path, body)
    assert (status, own_status) == (400, 400)
    assert refusal["error"] == own["error"]
    assert (refusal["error"]["param"], refusal["error"]["type"]) == (param, "BadRequestError")


async def test_a_chat_that_just_fits_is_served(pools: Pools) -> None:
    for text in ("7", "7 " * 20):
        (status, answer), (_, own) = await pools.both(CHAT, {**said(text), "temperature": 0})
        assert status == 200
        assert answer["choices"] == own["choices"]
