"""Models that come and go while the router runs: adapters, and engines that leave."""

import asyncio
import json

from tests.fakes.engine import FakeEngine
from tests.integration.router.conftest import Json, Open, Site

LORA: Json = {"model": "lora", "prompt": "abc", "max_tokens": 2}


async def answered(here: Site, body: Json, status: int) -> Json:
    """The router's answer, as soon as it has this status."""
    async with asyncio.timeout(10):
        while True:
            found, _, answer = await here.post(body)
            if found == status:
                told: Json = json.loads(answer)
                return told


async def listed(here: Site) -> dict[str, Json]:
    """The router's /v1/models, by name."""
    _, answer = await here.get("/v1/models")
    return {card["id"]: card for card in json.loads(answer)["data"]}


async def test_an_adapter_is_served_while_its_engines_have_it_loaded(site: Open) -> None:
    here = await site(prefill=0, decode=1)
    assert (await here.post(LORA))[0] == 404
    here.decode[0].adapters["lora"] = "/adapters/lora"
    await answered(here, LORA, 200)
    card = (await listed(here))["lora"]
    assert (card["parent"], card["root"]) == ("m", "/adapters/lora")
    del here.decode[0].adapters["lora"]
    async with asyncio.timeout(10):
        while "lora" in await listed(here):
            pass
    error = (await answered(here, LORA, 404))["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_a_request_goes_to_the_engine_that_has_its_adapter(site: Open) -> None:
    here = await site(prefill=0, decode=3)
    here.decode[2].adapters["lora"] = "/adapters/lora"
    await answered(here, LORA, 200)
    for _ in range(5):
        assert (await here.post(LORA))[0] == 200
    assert [len(engine.requests) for engine in here.decode] == [0, 0, 6]


async def test_a_model_whose_engine_is_gone_is_first_a_503_and_then_a_404(site: Open) -> None:
    def other(made: list[FakeEngine]) -> None:
        made[1].model = "n"

    here = await site(prefill=0, decode=2, prepare=other)
    await here.decode[0].stop()
    body = {"model": "m", "prompt": "abc", "max_tokens": 1}
    await answered(here, body, 503)
    here.app.core.models.keep_s = 0
    error = (await answered(here, body, 404))["error"]
    assert error["code"] == "model_not_found"
    assert (await here.post({**body, "model": "n"}))[0] == 200
