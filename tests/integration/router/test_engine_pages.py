"""Pages of engines that clients get by GET."""

import json

import pytest
from tests.fakes.engine import FakeEngine
from tests.integration.router.conftest import Open
from tests.integration.router.test_passthrough import Page, drop, offer, saying


async def test_an_engine_tells_its_tokenizer(site: Open) -> None:
    here = await site(1, 1)
    offer(here.decode, saying(200, {"tokenizer_class": "T"}), "/tokenizer_info")
    for query in ("", "?model=m"):
        status, answer = await here.get(f"/tokenizer_info{query}")
        assert (status, json.loads(answer)) == (200, {"tokenizer_class": "T"})
    assert here.decode[0].posted == [("/tokenizer_info", b"")] * 2
    assert (await here.get("/tokenizer_info?model=x"))[0] == 404
    assert (await here.post({}, "/tokenizer_info"))[0] == 405


async def test_an_engine_that_keeps_its_tokenizer_to_itself_is_not_asked(site: Open) -> None:
    def lists(made: list[FakeEngine]) -> None:
        for engine in made:
            engine.endpoints = ("/v1/completions",)

    here = await site(0, 1, prepare=lists)
    status, answer = await here.get("/tokenizer_info")
    assert (status, json.loads(answer)["error"]["code"]) == (404, "endpoint_not_served")


async def test_the_load_is_the_sum_of_what_engines_say(site: Open) -> None:
    here = await site(1, 3)
    status, answer = await here.get("/load")
    assert (status, json.loads(answer)["error"]["code"]) == (404, "endpoint_not_served")
    for load, engine in enumerate((*here.prefill, *here.decode[1:]), start=1):
        offer([engine], saying(200, {"server_load": load}), "/load")
    offer(here.decode[:1], drop, "/load")
    status, answer = await here.get("/load")
    assert (status, json.loads(answer)) == (200, {"server_load": 1 + 2 + 3})


@pytest.mark.parametrize("page", [saying(200, {}), saying(200, [1]), saying(200, b"x"), drop])
async def test_a_load_that_no_engine_says_well_is_none(site: Open, page: Page) -> None:
    here = await site(0, 1)
    offer(here.decode, page, "/load")
    assert (await here.get("/load"))[0] == 404


async def test_what_is_unknown_below_v1_is_not_found_by_any_method(site: Open) -> None:
    here = await site(0, 1)
    for method in ("GET", "PUT", "DELETE"):
        async with here.http.request(method, here.url("/v1/unknown")) as answer:
            assert answer.status == 404
    async with here.http.get(here.url("/v1/chat/completions")) as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
