"""What passes for right where only another engine knows what is: equal tokens, or a near tie."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer
from kvrouter.tools.demo.alone import Alone
from kvrouter.tools.demo.workload import CHAT, COMPLETIONS, Reply

ASKED = {"model": "m", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}


def tops(token: int, other: float) -> dict[str, float]:
    """Log-probabilities of the likeliest token, and of token 9."""
    return {f"token_id:{token}": -0.7, "token_id:9": other}


class Engine:
    """Says the same to everybody, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.tokens = [5, 6, 7]
        self.tops = [tops(5, -3.0), tops(6, -0.7001), tops(7, -3.0)]
        self.asked: dict[str, Any] = {}
        self.server = HttpServer(self._answer)
        self.url = ""

    async def _answer(self, exchange: Exchange) -> None:
        self.asked = json.loads(exchange.body)
        if exchange.path == CHAT:
            each = [[{"token": t, "logprob": p} for t, p in top.items()] for top in self.tops]
            logprobs: dict[str, Any] = {"content": [{"top_logprobs": top} for top in each]}
        else:
            logprobs = {"top_logprobs": self.tops}
        choice = {"token_ids": self.tokens, "logprobs": logprobs}
        whole = {"choices": [choice], "usage": {"prompt_tokens": 4}}
        exchange.respond(self.status, json.dumps(whole).encode(), content_type="application/json")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    made.url = f"http://127.0.0.1:{await made.server.listen('127.0.0.1', 0)}"
    yield made
    await made.server.close()


@pytest.fixture
async def alone(engine: Engine) -> AsyncIterator[Alone]:
    async with aiohttp.ClientSession() as session:
        yield Alone(session, engine.url, 10.0)


def reply(tokens: tuple[int, ...], path: str = COMPLETIONS, prompt_tokens: int = 4) -> Reply:
    return Reply(0.1, prompt_tokens, path=path, body=dict(ASKED), tokens=tokens)


async def problem(alone: Alone, asked: Reply) -> str:
    [checked] = await alone.checked([asked])
    return checked.problem


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_equal_tokens_are_right(alone: Alone, engine: Engine, path: str) -> None:
    assert await problem(alone, reply((5, 6, 7), path)) == ""
    assert alone.near_ties == 0
    assert engine.asked["stream"] is False
    assert "stream_options" not in engine.asked
    assert engine.asked["cache_salt"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_other_side_of_a_near_tie_is_counted_and_right(alone: Alone, path: str) -> None:
    assert await problem(alone, reply((5, 9, 9), path)) == ""
    assert alone.near_ties == 1


@pytest.mark.parametrize("tokens", [(9, 6, 7), (5, 6, 9), (5, 6), (5,), (5, 6, 7, 8), ()])
async def test_other_tokens_are_wrong(alone: Alone, tokens: tuple[int, ...]) -> None:
    assert "one engine alone answers [5, 6, 7]" in await problem(alone, reply(tokens))
    assert alone.near_ties == 0


async def test_another_number_of_prompt_tokens_is_wrong(alone: Alone) -> None:
    assert "counts 3 prompt tokens, not 4" in await problem(alone, reply((5, 6, 7), CHAT, 3))


async def test_an_engine_that_refuses_makes_no_answer_right(alone: Alone, engine: Engine) -> None:
    engine.status = 500
    assert "status 500" in await problem(alone, reply((5, 6, 7)))


async def test_what_was_wrong_before_stays_so(alone: Alone, engine: Engine) -> None:
    assert await problem(alone, Reply(0.0, 0, "it broke off")) == "it broke off"
    assert engine.asked == {}
