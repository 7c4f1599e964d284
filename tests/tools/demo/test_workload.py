"""The demo's requests: what they are, and that nothing wrong passes for right."""

import json
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from tests.tools.sim.conftest import LiveSim

from kvrouter.cli.main import COMMANDS
from kvrouter.cli.run_command import load_settings
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer
from kvrouter.tools.demo.children import engine_flags
from kvrouter.tools.demo.settings import DemoSettings
from kvrouter.tools.demo.workload import Conversation, Reply, Workload, conversations
from kvrouter.tools.sim.kv_bytes import Oracle
from kvrouter.tools.sim.settings import SimSettings

SETTINGS = SimSettings(model="m", port=0, block_size=16, kv_bytes_per_token=64)


@pytest.fixture(scope="module")
def sim() -> Iterator[LiveSim]:
    with LiveSim(SETTINGS) as live:
        yield live


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


TOKENS = 12


def workload(session: aiohttp.ClientSession, port: int) -> Workload:
    work = Workload(session, "m", TOKENS)
    work.url = f"http://127.0.0.1:{port}"
    return work


def checked(reply: Reply) -> Reply:
    reply.check(Oracle(SETTINGS.manifest), TOKENS)
    return reply


def test_conversations_share_documents_and_half_of_those_are_chats() -> None:
    every = conversations(4, 8)
    assert [each.document for each in every[:4]] == [each.document for each in every[4:]]
    assert len({each.document for each in every}) == 4
    assert [each.chat for each in every] == [True, False] * 4
    assert all(len(each.document) > 5000 for each in every)


async def test_the_oracle_agrees_with_an_engine_over_several_turns(
    session: aiohttp.ClientSession, sim: LiveSim
) -> None:
    done: list[Reply] = []
    work = workload(session, sim.port)
    replies = await work.run(conversations(2, 4), 3, concurrency=2, done=done.append)
    assert [checked(reply).problem for reply in replies] == [""] * 12
    assert done == replies
    assert all(reply.ttft_s > 0 for reply in replies)


async def test_the_next_turn_begins_with_all_that_was_said(
    session: aiohttp.ClientSession, sim: LiveSim
) -> None:
    work = workload(session, sim.port)
    for talk in conversations(2, 2):
        first = await work.ask(talk, "Why?")
        later = await work.ask(talk, "And then?")
        assert first.text in json.dumps(later.body)
        assert later.prompt_tokens > first.prompt_tokens


def answering(status: int, body: bytes) -> HttpServer:
    async def handle(exchange: Exchange) -> None:
        exchange.respond(status, body, content_type="text/event-stream")

    return HttpServer(handle)


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 10}}\n\n'
WRONG = b'data: {"choices": [{"index": 0, "text": "nonsense"}]}\n\n' + USAGE + b"data: [DONE]\n\n"
MISCOUNTED = b'data: {"choices": [{"index": 0, "text": "nonsense"}]}\n\ndata: [DONE]\n\n'
BROKEN = b'data: {"choices": [{"index": 0, "text": "non"}]}\n\n'
ERROR = b'data: {"error": {"message": "engine died"}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, WRONG, "answered 'nonsense', which is wrong"),
        (200, MISCOUNTED, "its usage counts 0 prompt tokens"),
        (200, BROKEN, "its stream broke off"),
        (200, ERROR, "engine died"),
        (200, b"data: nonsense\n\n", "JSONDecodeError"),
        (503, b"no engine", "status 503: no engine"),
    ],
)
async def test_whatever_is_not_the_right_answer_is_a_problem(
    session: aiohttp.ClientSession, status: int, body: bytes, problem: str
) -> None:
    server = answering(status, body)
    port = await server.listen("127.0.0.1", 0)
    try:
        work = workload(session, port)
        reply = checked(await work.ask(Conversation("c", "text", chat=False), "Why?"))
    finally:
        await server.close()
    assert problem in reply.problem


async def test_a_router_that_is_not_there_is_a_problem(session: aiohttp.ClientSession) -> None:
    reply = await workload(session, 1).ask(Conversation("c", "text", chat=True), "Why?")
    assert "ClientConnectorError" in reply.problem


def test_engines_take_as_long_for_a_token_as_the_settings_say() -> None:
    settings = DemoSettings(prefill_time_per_token_us=7)
    flags = engine_flags(settings, "kv://127.0.0.1:1", "tcp://127.0.0.1:2")
    parsed = load_settings(next(c for c in COMMANDS if c.name == "sim"), list(flags)).settings
    assert parsed.prefill_time_per_token == pytest.approx(7e-6)
