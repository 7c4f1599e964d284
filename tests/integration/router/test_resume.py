"""Streams whose engine dies go on elsewhere: simulated engines, whose every token is known."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.fakes.link import Link
from tests.fakes.openai_cases import CHAT, COMPLETIONS
from tests.fakes.patience import until

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings
from kvrouter.telemetry.request_log import RequestLog
from kvrouter.tools.sim import requests
from kvrouter.tools.sim.kv_bytes import Oracle
from kvrouter.tools.sim.serve import SimServer
from kvrouter.tools.sim.settings import SimSettings

SIM = SimSettings(model="tiny", port=0, block_size=16, inter_token_latency="5ms")  # type: ignore[arg-type]
ORACLE = Oracle(SIM.manifest)
PROMPT = list(range(50))
TOKENS = 60
Json = dict[str, Any]


@dataclass
class Fleet:
    """A router before two simulated engines, each behind a link that can be cut."""

    app: App
    port: int
    links: list[Link]
    http: aiohttp.ClientSession
    written: io.BytesIO

    async def events(self, cuts: tuple[int, ...] = (), **more: Any) -> list[Json]:
        """The events of one stream; after so many of them all links are cut."""
        path = CHAT if "messages" in more else COMPLETIONS
        body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0}
        if path == COMPLETIONS:
            body["prompt"] = PROMPT
        found: list[Json] = []
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.http.post(url, json={**body, "stream": True, **more}) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    found.append({"done": True})
                elif data:
                    found.append(json.loads(data))
                if len(found) in cuts and data:
                    for link in self.links:
                        link.cut()
        return found

    async def counted(self, outcome: str) -> float:
        async with self.http.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
            page = await answer.text()
        name = f'kvrouter:streams_broken_total{{outcome="{outcome}"}} '
        found = [line.removeprefix(name) for line in page.splitlines() if line.startswith(name)]
        return float(found[0]) if found else 0.0


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    sims = [SimServer(SIM) for _ in range(2)]
    ports = [await sim.start() for sim in sims]
    links = [Link(("127.0.0.1", port)).start() for port in ports]
    addresses = [link.url.removeprefix("kv://") for link in links]
    settings = RouterSettings(decode=addresses, port=0, resume_streams=True, health_interval_s=0.1)
    written = io.BytesIO()
    app = build(settings, RequestLog(written, plain=False))
    port = await app.start()
    async with aiohttp.ClientSession() as http:
        yield Fleet(app, port, links, http, written)
    await app.close()
    assert app.core.metrics.running == 0
    assert all(engine.requests == 0 for engine in app.core.pool.all())
    for link in links:
        await asyncio.to_thread(link.close)
    for sim in sims:
        await sim.close()


def choices(events: list[Json]) -> list[Json]:
    return [choice for event in events for choice in event.get("choices", [])]


def said(events: list[Json], index: int = 0) -> str:
    """What was said of one choice."""
    mine = [choice for choice in choices(events) if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in mine)


@pytest.mark.parametrize("prompt", [PROMPT, "Once upon a time in a quiet harbour"])
@pytest.mark.parametrize("cuts", [(1,), (20,), (59,), (10, 30), (5, 20, 45)])
async def test_a_stream_goes_on_where_its_engine_broke_off(
    fleet: Fleet, cuts: tuple[int, ...], prompt: str | list[int]
) -> None:
    usage = {"include_usage": True}
    events = await fleet.events(cuts, prompt=prompt, stream_options=usage)
    ids = prompt if isinstance(prompt, list) else ORACLE.tokenizer.encode(prompt)
    assert said(events) == ORACLE.text(ids, TOKENS)
    assert [event for event in events if "error" in event] == []
    assert [event for event in events if "done" in event] == events[-1:]
    told = events[-2]["usage"]
    assert (told["prompt_tokens"], told["completion_tokens"]) == (len(ids), TOKENS)
    assert told["total_tokens"] == len(ids) + TOKENS
    assert len({(event["id"], event["created"]) for event in events[:-1]}) == 1
    assert not any("token_ids" in choice for event in events for choice in event.get("choices", []))
    reasons = [c["finish_reason"] for e in events for c in e.get("choices", [])]
    assert [reason for reason in reasons if reason] == ["length"]
    resumed = await fleet.counted("resumed")
    assert resumed <= len(cuts)
    assert resumed or cuts == (59,)  # its last token may have passed before the cut


async def test_a_stream_of_an_alias_goes_on_with_its_model(fleet: Fleet) -> None:
    fleet.app.core.models.aliases = {"alias": {"tiny": 1}}
    assert said(await fleet.events((10,), model="alias")) == ORACLE.text(PROMPT, TOKENS)
    assert await fleet.counted("resumed")


async def test_a_resumed_stream_that_the_router_cuts_off_tells_all_its_tokens(fleet: Fleet) -> None:
    task = asyncio.create_task(fleet.events((10,), max_tokens=900))
    await until(lambda: fleet.app.core.metrics.resumed["resumed"])
    await fleet.app.close()
    *events, error, done = await task
    assert done == {"done": True}
    assert "stopping" in error["error"]["message"]
    tokens = len(events)
    assert said(events) == ORACLE.text(PROMPT, tokens)
    [line] = [json.loads(line) for line in fleet.written.getvalue().splitlines()]
    assert (line["outcome"], line["generated"]) == ("cut_off", tokens)


async def test_a_client_that_asked_for_token_ids_gets_them_once(fleet: Fleet) -> None:
    whole = await fleet.events(return_token_ids=True)
    events = await fleet.events((10, 30), return_token_ids=True)
    assert events[0]["choices"][0]["prompt_token_ids"] == PROMPT
    assert sum("prompt_token_ids" in c for e in events for c in e.get("choices", [])) == 1
    assert [c["token_ids"] for e in events for c in e.get("choices", [])] == [
        c["token_ids"] for e in whole for c in e.get("choices", [])
    ]


async def test_a_stream_that_nothing_happens_to_is_as_without(fleet: Fleet) -> None:
    events = await fleet.events()
    assert said(events) == ORACLE.text(PROMPT, TOKENS)
    assert len(events) == TOKENS + 1
    assert await fleet.counted("resumed") == 0


MESSAGES = [{"role": "user", "content": "Once upon a time in a quiet harbour"}]
RENDERED = ORACLE.tokenizer.render_chat(
    MESSAGES, add_generation_prompt=True, continue_final_message=False
)
USAGE = {"include_usage": True}


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("cuts", [(1,), (2,), (20,), (60,), (10, 30), (5, 20, 45)])
async def test_a_chat_goes_on_where_its_engine_broke_off(
    fleet: Fleet, cuts: tuple[int, ...], limit: str
) -> None:
    more = {"max_tokens": None, limit: TOKENS}
    events = await fleet.events(cuts, messages=MESSAGES, stream_options=USAGE, **more)
    assert said(events) == ORACLE.text(RENDERED, TOKENS)
    assert [event for event in events if "error" in event] == []
    assert [event for event in events if "done" in event] == events[-1:]
    told = events[-2]["usage"]
    assert (told["prompt_tokens"], told["completion_tokens"]) == (len(RENDERED), TOKENS)
    heads = {(event["id"], event["object"], event["created"]) for event in events[:-1]}
    assert len(heads) == 1
    assert [c["delta"]["role"] for c in choices(events) if "role" in c["delta"]] == ["assistant"]
    assert "token_ids" not in str(events)
    assert [c["finish_reason"] for c in choices(events) if c["finish_reason"]] == ["length"]
    assert await fleet.counted("resumed") or cuts == (60,)


async def test_a_chat_shows_token_ids_to_who_asked_for_them_once(fleet: Fleet) -> None:
    whole = await fleet.events(messages=MESSAGES, return_token_ids=True)
    events = await fleet.events((10, 30), messages=MESSAGES, return_token_ids=True)
    assert [event.get("prompt_token_ids") for event in events] == [
        event.get("prompt_token_ids") for event in whole
    ]
    assert [choice.get("token_ids") for choice in choices(events)] == [
        choice.get("token_ids") for choice in choices(whole)
    ]


async def test_a_chat_without_a_limit_goes_on(fleet: Fleet) -> None:
    events = await fleet.events((10,), messages=MESSAGES, max_tokens=None)
    told = [choice for choice in choices(events) if "role" not in choice["delta"]]
    assert said(events) == ORACLE.text(RENDERED, len(told))
    assert told[-1]["finish_reason"] == "stop"
    assert await fleet.counted("resumed") == 1


async def test_a_chat_whose_next_engine_begins_anew_ends_with_an_error(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_reused_ids", lambda _: None)  # as vLLM before 0.32
    events = await fleet.events((10,), messages=MESSAGES)
    assert events[-2]["error"]["code"] == 502
    assert ORACLE.text(RENDERED, TOKENS).startswith(said(events))
    assert all(engine.breaker.allows() for engine in fleet.app.core.pool.all() if engine.breaker)


@pytest.mark.parametrize("cuts", [(1,), (40,), (30, 100), (178,)])
async def test_each_prompt_of_a_list_goes_on_by_itself(fleet: Fleet, cuts: tuple[int, ...]) -> None:
    prompts = [PROMPT, list(range(7)), list(range(100, 150))]
    events = await fleet.events(cuts, prompt=prompts, stream_options=USAGE)
    for index, prompt in enumerate(prompts):
        assert said(events, index) == ORACLE.text(prompt, TOKENS)
    assert [event for event in events if "error" in event] == []
    assert [event for event in events if "done" in event] == events[-1:]
    told = events[-2]["usage"]
    assert told["prompt_tokens"] == sum(map(len, prompts))
    assert told["completion_tokens"] == len(prompts) * TOKENS
    assert "token_ids" not in str(events)
    assert await fleet.counted("resumed") >= (cuts != (178,))


async def test_a_list_whose_engines_die_again_and_again_ends_with_one_error(fleet: Fleet) -> None:
    events = await fleet.events((5, 15, 30, 45, 60), prompt=[PROMPT, PROMPT[:9]])
    assert events[-2]["error"]["code"] == 502
    assert events[-1] == {"done": True}
    assert len([event for event in events if "error" in event]) == 1
    assert ORACLE.text(PROMPT, TOKENS).startswith(said(events))


@pytest.mark.parametrize("temperature", [None, 0.7])
async def test_what_is_drawn_at_random_without_a_seed_goes_on(
    fleet: Fleet, temperature: float | None
) -> None:
    events = await fleet.events((20,), temperature=temperature)
    assert len(choices(events)) == TOKENS
    assert await fleet.counted("resumed") == 1


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.7, "seed": 1},
        {"stop": ["xyzzy"]},
        {"frequency_penalty": 0.5},
        {"n": 2, "temperature": 0.7},
        {"prompt": [PROMPT, PROMPT], "temperature": 0.7, "seed": 1},
    ],
)
async def test_a_stream_that_could_go_on_otherwise_ends_with_an_error(
    fleet: Fleet, more: Json
) -> None:
    events = await fleet.events((10,), **more)
    assert events[-2]["error"]["code"] == 502
    assert len(choices(events)) < TOKENS
    assert await fleet.counted("resumed") == 0


async def test_a_stream_whose_engines_all_die_again_and_again_ends_with_an_error(
    fleet: Fleet,
) -> None:
    events = await fleet.events((5, 10, 15, 20, 25))
    assert events[-2]["error"]["code"] == 502
    assert events[-1] == {"done": True}
    assert ORACLE.text(PROMPT, TOKENS).startswith(said(events))
    assert await fleet.counted("given up") == 1
