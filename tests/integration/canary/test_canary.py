"""What the canary samples, when it asks, what it calls a near tie, and what clients see of it."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.fakes.canary import canary_outcomes
from tests.fakes.engine import FakeEngine, engines
from tests.fakes.patience import until

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings
from kvrouter.canary.replay import MAX_BODY_BYTES
from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange

Json = dict[str, Any]
PATIENT_S = 20.0
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GREEDY: Json = {"prompt": "Hello, you there", "max_tokens": 3, "temperature": 0}
CHAT: Json = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 3,
    "temperature": 0,
}
ALIKE = {"token_id:3": -0.70, "token_id:9": -0.75}
APART = {"token_id:9": -0.01, "token_id:3": -4.9}


class Script:
    """An engine's answers: `served` to clients, `alone` to who brings the canary's salt.

    Attributes:
        likeliest: log-probabilities of the last token, where they are asked for.
        refuses: status of its answer to replays, where it is no 200.
        replays: bodies of those.
    """

    def __init__(self) -> None:
        self.served, self.alone = [1, 2, 3], [1, 2, 3]
        self.likeliest: dict[str, float] | None = None
        self.refuses = 0
        self.replays: list[Json] = []

    async def __call__(self, exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        salted = str(body.get("cache_salt", "")).startswith("canary-")
        if salted:
            self.replays.append(body)
            if self.refuses:
                exchange.respond(self.refuses, b'{"error": {"message": "no salt here"}}')
                return
        tokens = (self.alone if salted else self.served)[: body["max_tokens"]]
        if body.get("stream"):
            self._stream(exchange, body, tokens)
        else:
            exchange.respond(200, json.dumps(self._whole(body, tokens)).encode())

    def _whole(self, body: Json, tokens: list[int]) -> Json:
        named = bool(body.get("return_token_ids"))
        choice: Json = {"index": 0, "finish_reason": "length", "stop_reason": None}
        text = "".join(map(chr, tokens))
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["token_ids"] = tokens if named else None
        if self.likeliest is not None and body.get("logprobs"):
            choice["logprobs"] = self._logprobs(body, len(tokens))
        usage = {"prompt_tokens": 5, "completion_tokens": len(tokens), "total_tokens": 8}
        told = {"prompt_token_ids": [7] if named else None}
        return {"id": "c", "object": "x", "model": "m", "choices": [choice], "usage": usage, **told}

    def _logprobs(self, body: Json, count: int) -> Json:
        assert body["return_tokens_as_token_ids"] is True
        assert self.likeliest is not None
        if "messages" not in body:
            return {"top_logprobs": [{}] * (count - 1) + [self.likeliest]}
        top = [{"token": name, "logprob": value} for name, value in self.likeliest.items()]
        return {"content": [{"top_logprobs": []}] * (count - 1) + [{"top_logprobs": top}]}

    def _stream(self, exchange: Exchange, body: Json, tokens: list[int]) -> None:
        exchange.start(200, SSE_HEADERS)
        for at, token in enumerate(tokens):
            reason = "length" if at == len(tokens) - 1 else None
            choice: Json = {"index": 0, "text": chr(token), "finish_reason": reason}
            if body.get("return_token_ids"):
                choice["token_ids"] = [token]
                choice.update({"prompt_token_ids": [7]} if not at else {})
            event = {"id": "c", "object": "x", "model": "m", "choices": [choice]}
            exchange.write(b"data: %b\n\n" % json.dumps(event).encode())
        exchange.write(b"data: [DONE]\n\n")
        exchange.end()


class Site:
    """A router with a canary before one engine that answers as its script says."""

    def __init__(self, app: App, port: int, engine: FakeEngine, script: Script) -> None:
        self.app = app
        self.engine = engine
        self.script = script
        self._port = port

    async def ask(self, body: Json, path: str = COMPLETIONS) -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{self._port}{path}"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, data=json.dumps(body)) as answer,
        ):
            return answer.status, await answer.read()

    async def outcomes(self, judged: int) -> Counter[str]:
        """How that many samples ended, once they all have."""
        await until(lambda: self.judged.total() >= judged, PATIENT_S)
        return self.judged

    @property
    def judged(self) -> Counter[str]:
        return canary_outcomes(self.app)


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    async with engines(1) as (engine,):
        script = Script()
        app = build(
            RouterSettings(
                decode=[engine.address],
                port=0,
                policy="round_robin",
                **{"canary_sample_rate": 1, **settings},
            )
        )
        try:
            port = await app.start()
            engine.pages = {COMPLETIONS: script, CHATS: script}
            yield Site(app, port, engine, script)
        finally:
            await app.close()
        assert all(e.requests == 0 for e in app.core.pool.all())


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, GREEDY), (CHATS, CHAT)])
async def test_a_replay_is_the_request_alone_under_a_salt_of_its_own(path: str, body: Json) -> None:
    async with site() as here:
        salted = {**body, "cache_salt": "the tenant's", "user": "u"}
        for _ in range(2):
            await here.ask(salted, path)
        assert await here.outcomes(2) == {"equal": 2}
    one, other = here.script.replays
    assert one["cache_salt"] != other["cache_salt"]
    expected = {**salted, "return_token_ids": True, "cache_salt": one["cache_salt"]}
    assert one == expected


async def test_a_replay_of_an_alias_names_its_model() -> None:
    async with site(model_alias=["alias=m"]) as here:
        await here.ask({**GREEDY, "model": "alias"})
        assert await here.outcomes(1) == {"equal": 1}
    assert here.script.replays[0]["model"] == "m"


async def test_a_stream_is_replayed_whole() -> None:
    async with site() as here:
        options = {"include_usage": True}
        await here.ask({**GREEDY, "stream": True, "stream_options": options})
        assert await here.outcomes(1) == {"equal": 1}
    (replay,) = here.script.replays
    assert replay["stream"] is False
    assert "stream_options" not in replay


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_sees_token_ids_only_where_it_asked_for_them(stream: bool) -> None:
    async with site(canary_sample_rate=1) as here, site(canary_sample_rate=1e-9) as other:
        for asked in ({}, {"return_token_ids": True}):
            body = {**GREEDY, "stream": stream, **asked}
            seen, expected = (await here.ask(body))[1], (await other.ask(body))[1]
            assert _parsed(seen) == _parsed(expected)
        assert (await here.outcomes(2))["equal"] == 2
        assert not other.script.replays


def _parsed(answer: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in answer.split(b"\n") if line]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, GREEDY), (CHATS, CHAT)])
@pytest.mark.parametrize(
    ("likeliest", "outcome"), [(ALIKE, "near tie"), (APART, "diverged"), (None, "diverged")]
)
async def test_tokens_that_differ_are_an_alarm_unless_they_were_about_as_likely(
    path: str, body: Json, likeliest: dict[str, float] | None, outcome: str, caplog: Any
) -> None:
    async with site() as here:
        here.script.alone, here.script.likeliest = [1, 2, 9], likeliest
        await here.ask(body, path)
        assert await here.outcomes(1) == {outcome: 1}
    alarms = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(alarms) == (outcome == "diverged")
    assert all("token 2: 3 was sent, 9 was computed alone" in alarm for alarm in alarms)


async def test_how_near_a_tie_must_be_is_a_setting() -> None:
    async with site(canary_near_tie=0.01) as here:
        here.script.alone, here.script.likeliest = [1, 2, 9], ALIKE
        await here.ask(GREEDY)
        assert await here.outcomes(1) == {"diverged": 1}


async def test_an_answer_that_ends_sooner_is_an_alarm() -> None:
    async with site() as here:
        here.script.alone, here.script.likeliest = [1, 2], ALIKE
        await here.ask(GREEDY)
        assert await here.outcomes(1) == {"diverged": 1}


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.7},
        {"temperature": None},
        {"stop": ["x"]},
        {"logprobs": 1},
        {"max_tokens": 500},
        {"prompt": "x" * 2000},
        {"user": "x" * MAX_BODY_BYTES},
    ],
)
async def test_what_cannot_be_compared_or_is_long_is_not_sampled(more: Json) -> None:
    async with site(canary_max_tokens=400) as here:
        assert (await here.ask({**GREEDY, **more}))[0] == 200
        await here.ask(GREEDY)
        assert await here.outcomes(1) == {"equal": 1}
    assert len(here.script.replays) == 1


async def test_an_engine_that_refuses_replays_is_no_alarm(caplog: Any) -> None:
    async with site() as here:
        here.script.refuses = 400
        await here.ask(GREEDY)
        assert await here.outcomes(1) == {"failed": 1}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_the_canary_tells_its_outcomes_in_a_metric() -> None:
    async with site() as here:
        await here.ask(GREEDY)
        await here.outcomes(1)
        page = here.app.core.metrics.page().decode()
    assert 'kvrouter:canary_total{outcome="equal"} 1.0' in page


async def test_without_a_rate_there_is_no_canary() -> None:
    app = build(RouterSettings(decode=["127.0.0.1:1"], port=0))
    try:
        await app.start()
        assert "canary" not in app.core.metrics.page().decode()
    finally:
        await app.close()
