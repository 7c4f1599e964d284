"""A real SGLang engine behind the router: answers, pages by KV events, clients that leave."""

import http.client
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.contract.families.test_sglang_events import pages
from tests.fakes.patience import eventually
from tests.sglang.engines import (
    PAGE_TOKENS,
    PATIENCE_S,
    StartEngine,
    metric,
    request_lines,
    requests_of,
    until_idle,
)
from tests.vllm.asking import (
    Question,
    answer,
    answers,
    difference,
    questions,
    reference,
    token_prompt,
)
from tests.vllm.engines import Engine, ask, free_port, running
from tests.vllm.services import Service, start_router

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.tested("sglang", "completions and chats", "engines"),
    pytest.mark.tested("sglang", "KV events", "engines"),
]

KV_TOKENS = 4000  # fewer than the prompts below have in all: the engine evicts
PROMPTS = 40
ABORTED = "sglang:num_aborted_requests_total"


@dataclass(frozen=True)
class Served:
    """A router before one engine, which repeats its KV events at a port."""

    router: Service
    engine: Engine
    replay: int

    def events(self) -> list[Any]:
        """All KV events that the engine has published, as it sent them."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger, socket.rcvtimeo = 0, int(PATIENCE_S * 1000)
            socket.connect(f"tcp://127.0.0.1:{self.replay}")
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            found = []
            while payload := socket.recv_multipart()[-1]:
                found += msgspec.msgpack.decode(payload)[1]
        return found

    def held(self) -> int:
        """Pages that it holds by its events."""
        names: set[int] = set()
        for event in self.events():
            if event["type"] == "BlockStored":
                names.update(event["block_hashes"])
            else:  # removed, or all cleared, as at its start
                names.difference_update(event.get("block_hashes", list(names)))
        return len(names)

    def settle(self) -> None:
        """Return once the router knows as many pages as the engine says that it holds."""
        assert until_idle(self.engine)
        assert eventually(lambda: metric(self.router, "kvrouter:kv_index_blocks") == self.held())


@pytest.fixture(scope="module")
def served(start_engine: StartEngine, engine_folder: Path) -> Iterator[Served]:
    events, replay = f"tcp://127.0.0.1:{free_port()}", free_port()
    engine = start_engine("one", events=events, replay=replay, kv_tokens=KV_TOKENS)
    with running([engine]):
        flags = ["--kv-events-bind", events, "--kv-events-replay", str(replay)]
        router = start_router(engine_folder, [], [engine.url], None, flags)
        try:
            router.wait_log(f"engine {engine.address} joins")
            yield Served(router, engine, replay)
        finally:
            router.stop()


def test_completions_have_the_tokens_of_the_engine_itself(served: Served) -> None:
    asked = [one for one in questions(seed=1, count=32) if not one.chat]
    expected = [reference(served.engine.address, one) for one in asked]
    got = answers(served.router.address, asked, 8)
    assert [difference(*pair) for pair in zip(expected, got, strict=True)] == [""] * len(asked)
    assert [len(one.tokens) for one in got] == [one.max_tokens for one in asked]


@pytest.mark.parametrize("stream", [False, True])
def test_chats_have_the_text_of_the_engine_itself(stream: bool, served: Served) -> None:
    for seed in range(4):
        words = " ".join(map(str, random.Random(seed).choices(range(1000), k=60)))
        body = {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": 16,
            "stream": stream,
        }
        alone, routed = (text(one.address, body) for one in (served.engine, served.router))
        assert routed == alone
        assert routed


def text(address: str, body: dict[str, Any]) -> str:
    asked = {"model": "tiny", "temperature": 0, "ignore_eos": True, **body}
    status, data = ask(address, "POST", "/v1/chat/completions", asked, PATIENCE_S)
    assert status == 200, data[:500]
    if not body["stream"]:
        return str(json.loads(data)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])


def test_pages_have_the_names_that_tests_without_engines_give_them(served: Served) -> None:
    served.settle()
    before = len(served.events())
    prompt = token_prompt(random.Random(2), 5 * PAGE_TOKENS + 3)
    answer(served.router.address, Question("named", prompt, max_tokens=1))
    served.settle()
    stored = [event for event in served.events()[before:] if event["type"] == "BlockStored"]
    assert stored == pages(prompt)


def test_the_router_knows_what_the_engine_holds_page_by_page(served: Served) -> None:
    """Prompts with common beginnings, some of them salted, while pages are evicted."""
    draw, asked, cached = random.Random(3), list[list[int]](), list[int]()
    before = len(request_lines(served.router, 0))
    for number in range(PROMPTS):
        prefix = draw.choice(asked)[: draw.randrange(400)] if asked else []
        asked.append(token_prompt(draw, len(prefix) + draw.randrange(1, 300), prefix))
        served.settle()
        salt = draw.choice(["", "", "pepper"])
        question = Question(f"{number}", asked[-1], max_tokens=4, salt=salt)
        cached.append(answer(served.router.address, question).cached_tokens)
    lines = request_lines(served.router, before + PROMPTS)[before:]
    known = [line.get("hit_engine_tokens", 0) for line in lines]
    assert known == cached
    assert sum(map(bool, cached)) > PROMPTS / 2
    assert any(event["type"] == "BlockRemoved" for event in served.events())
    told = served.router.log.read_text()
    assert f"KV index of {served.engine.address}: EXACT (complete)" in told
    assert "was EXACT" not in told


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_in_the_engine(stream: bool, served: Served) -> None:
    assert until_idle(served.engine)
    before = metric(served.engine, ABORTED)
    prompt = token_prompt(random.Random(4), 100)
    body = Question("left", prompt, stream=stream, max_tokens=3000).body()
    connection = http.client.HTTPConnection(served.router.address, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert eventually(lambda: requests_of(served.engine) == 1)
    connection.close()
    assert until_idle(served.engine)
    assert metric(served.engine, ABORTED) == before + 1
    assert metric(served.router, "kvrouter:num_requests_running") == 0
