"""Whose word on a prompt's tokens is taken: /tokenize where it knows, else the prefill leg."""

import asyncio
import json
from typing import Any

import pytest
from tests.integration.router.conftest import Open, chat, metric, text
from tests.integration.router.test_landing import announce

from kvrouter.http.server.exchange import Exchange


@pytest.mark.parametrize("more", [{"documents": [{"text": "d"}]}, {"tool_choice": "none"}])
async def test_what_tokenize_is_not_told_of_is_left_to_the_prefill_leg(
    site: Open, more: dict[str, Any]
) -> None:
    here = await site(policy="prefix")
    status, _, _ = await here.post(chat(**more), "/v1/chat/completions")
    assert status == 200
    assert here.prefill[0].requests[0]["return_token_ids"] is True
    assert "kv_transfer_params" not in here.prefill[0].requests[0]
    assert here.decode[0].requests[0]["kv_transfer_params"]["prompt_token_ids"]


async def test_a_text_that_is_echoed_stays_a_text(site: Open) -> None:
    here = await site(policy="prefix")
    assert (await here.post(text(echo=True)))[0] == 200
    assert here.decode[0].requests[0]["prompt"] == "Hello, you there"


async def test_a_suffix_stays_beside_its_text(site: Open) -> None:
    here = await site(policy="prefix")
    assert (await here.post(text(suffix=" end")))[0] == 200
    assert here.prefill[0].requests == []
    assert here.decode[0].requests[0]["prompt"] == "Hello, you there"


async def test_what_cannot_be_served_is_a_400_that_names_the_parameter(site: Open) -> None:
    here = await site()
    status, _, body = await here.post(text(vllm_xargs={"kv_transfer_params": "x"}))
    assert (status, json.loads(body)["error"]["param"]) == (400, "vllm_xargs")
    assert here.decode[0].requests == here.prefill[0].requests == []


async def test_an_engine_that_does_not_tokenise_delays_one_request(site: Open) -> None:
    """The others go on without ids, and find what they share by their text."""
    here = await site(policy="prefix", prepare=announce)
    lets_go, asked = asyncio.Event(), list[bytes]()

    async def hang(exchange: Exchange) -> None:
        asked.append(exchange.body)
        await lets_go.wait()
        exchange.respond(200, b'{"tokens":[1,2]}')

    here.decode[0].pages["/tokenize"] = hang
    for number in range(5):
        assert (await here.post(text(prompt=f"Hello, number {number}")))[0] == 200
    assert len(asked) == 2, "and once more, so that its answer is not lost"
    assert await metric(here, 'kvrouter:tokenize_total{kind="late"}') == 5
    lets_go.set()
