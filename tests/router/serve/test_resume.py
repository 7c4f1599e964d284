"""Streams whose engine dies go on elsewhere: simulated engines, whose every token is known."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.link import Link

from kvrouter.app import App
from kvrouter.config import RouterSettings
from kvrouter.openai import parse
from kvrouter.resume import Spoken, resumable
from kvrouter.sim.config import SimSettings
from kvrouter.sim.oracle import Oracle
from kvrouter.sim.serve import SimServer
from kvrouter.sim.store_link import sim_manifest
from kvstore.chain import root_hash

SIM = SimSettings(model="tiny", port=0, block_size=16, inter_token_latency="5ms")  # type: ignore[arg-type]
MANIFEST = sim_manifest(SIM.model, "sim", SIM.block_size, SIM.block_bytes, root_hash(None))
ORACLE = Oracle(MANIFEST)
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

    async def events(self, cuts: tuple[int, ...] = (), **more: Any) -> list[Json]:
        """The events of one stream; after so many of them all links are cut."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        found: list[Json] = []
        url = f"http://127.0.0.1:{self.port}/v1/completions"
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
    app = App(settings)
    port = await app.start()
    async with aiohttp.ClientSession() as http:
        yield Fleet(app, port, links, http)
    await app.close()
    assert app.metrics.running == 0
    assert all(engine.requests == 0 for engine in app.pool.all())
    for link in links:
        await asyncio.to_thread(link.close)
    for sim in sims:
        await sim.close()


def said(events: list[Json]) -> str:
    return "".join(choice["text"] for event in events for choice in event.get("choices", []))


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


@pytest.mark.parametrize(
    "more", [{"temperature": 0.7}, {"stop": ["xyzzy"]}, {"frequency_penalty": 0.5}]
)
async def test_a_stream_that_could_go_on_otherwise_ends_with_an_error(
    fleet: Fleet, more: Json
) -> None:
    events = await fleet.events((10,), **more)
    assert events[-2]["error"]["code"] == 502
    assert ORACLE.text(PROMPT, TOKENS).startswith(said(events))


async def test_a_stream_whose_engines_all_die_again_and_again_ends_with_an_error(
    fleet: Fleet,
) -> None:
    events = await fleet.events((5, 10, 15, 20, 25))
    assert events[-2]["error"]["code"] == 502
    assert events[-1] == {"done": True}
    assert ORACLE.text(PROMPT, TOKENS).startswith(said(events))
    assert await fleet.counted("given up") == 1


@pytest.mark.parametrize(
    ("more", "whether"),
    [
        ({}, True),
        ({"temperature": 0.0, "n": 1, "stop": None, "echo": False, "logprobs": None}, True),
        ({"temperature": 0.1}, False),
        ({"temperature": None}, False),
        ({"logprobs": 1}, False),
        ({"stop": "x"}, False),
        ({"stream": False}, False),
        ({"presence_penalty": 1}, False),
        ({"return_token_ids": True}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"what_is_not_known": 1}, False),
    ],
)
def test_only_what_its_tokens_determine_is_resumed(more: Json, whether: bool) -> None:
    body = {"model": "m", "prompt": [1], "temperature": 0, "stream": True, **more}
    assert resumable(parse(json.dumps(body).encode(), "completion", 8)) is whether


def event(number: int, text: str, *, last: bool = False) -> bytes:
    reason = "length" if last else None
    choice = {"index": 0, "text": text, "finish_reason": reason, "token_ids": [number]}
    return b"data: %b\n\n" % json.dumps({"id": "a", "choices": [choice]}).encode()


@given(st.lists(st.sampled_from(["", "x", "yz"]), max_size=20))
def test_tokens_whose_text_was_held_back_are_said_again(texts: list[str]) -> None:
    spoken = Spoken()
    spoken.take(b"".join(event(number, text) for number, text in enumerate(texts)))
    shown = max((number + 1 for number, text in enumerate(texts) if text), default=0)
    spoken.go_on()
    assert spoken.tokens == list(range(shown))
    assert spoken.before == shown


def test_an_engine_that_does_not_name_its_tokens_is_not_followed() -> None:
    spoken = Spoken()
    spoken.take(b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n')
    assert not spoken.told


def test_an_engine_that_dies_after_its_last_token_owes_usage_and_the_end() -> None:
    spoken = Spoken()
    spoken.take(event(1, "a") + event(2, "b", last=True))
    assert spoken.finish == "length"
    assert spoken.ending(None) == b"data: [DONE]\n\n"
    owed, end, rest = spoken.ending(7).split(b"\n\n")
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert json.loads(owed.removeprefix(b"data: ")) == {"id": "a", "choices": [], "usage": usage}
    assert (end, rest) == (b"data: [DONE]", b"")
