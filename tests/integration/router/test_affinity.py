"""Sessions stay with the engine that has them, also where engines do not say what they hold."""

import asyncio
import contextlib
import random
from itertools import pairwise

import aiohttp
import pytest
from tests.fakes.engine import FakeEngine
from tests.fakes.tensorrt_llm import TensorRtLlmEngine
from tests.integration.router.conftest import Json, Open, Site
from tests.integration.router.test_passthrough import Page, drop, offer, saying, streaming

from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange

SESSIONS, TURNS, ENGINES = 20, 8, 4
AFFINITY: Json = {"policy": "prefix", "route_headers": True, "health_interval_s": 60.0}
AT_ONCE = 2  # sessions that have a turn in flight: half of the engines are busy
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MEMBERS = {RESPONSES: "input"}  # where the turns are, if not in `messages`


class Session:
    """A chat that grows; `engines` are those that its turns went to."""

    def __init__(self, number: int, system: str, headers: dict[str, str]) -> None:
        self.draw = random.Random(number)
        self.headers = headers
        self.messages: list[Json] = [{"role": "system", "content": system}]
        self.engines: list[str] = []

    def words(self, count: int) -> str:
        return " ".join(f"{self.draw.randrange(10**6):06}" for _ in range(count))

    async def turn(self, here: Site, path: str) -> None:
        self.messages.append({"role": "user", "content": self.words(60)})
        body = {"model": "m", MEMBERS.get(path, "messages"): self.messages, "max_tokens": 4}
        status, fields, _ = await here.post(body, path, **self.headers)
        assert status == 200
        self.engines.append(fields["x-kvrouter-decode"])
        self.messages.append({"role": "assistant", "content": self.words(80)})


def sessions(system: str, named: str) -> list[Session]:
    return [
        Session(number, system, {named: f"session {number}"} if named else {})
        for number in range(SESSIONS)
    ]


async def play(here: Site, every: list[Session], path: str = CHAT) -> None:
    """Turn by turn in random order, at most AT_ONCE at a time."""
    order = [session for session in every for _ in range(TURNS)]
    random.Random(1).shuffle(order)
    locks = {session: asyncio.Lock() for session in every}
    room = asyncio.Semaphore(AT_ONCE)

    async def turn(session: Session) -> None:
        async with locks[session], room:
            await session.turn(here, path)

    await asyncio.gather(*map(turn, order))


def kept(every: list[Session]) -> float:
    """The share of later turns that went where the turn before had gone."""
    pairs = [pair for session in every for pair in pairwise(session.engines)]
    return sum(one == other for one, other in pairs) / len(pairs)


@pytest.mark.parametrize("named", ["", "x-session-id", "x-claude-code-session-id"])
@pytest.mark.parametrize(
    ("kind", "family"),
    [(FakeEngine, "openai"), (FakeEngine, "sglang"), (TensorRtLlmEngine, "auto")],
    ids=["openai", "sglang", "tensorrt-llm"],
)
async def test_turns_of_a_session_go_to_the_engine_that_has_its_prefix(
    site: Open, kind: type[FakeEngine], family: str, named: str
) -> None:
    here = await site(0, ENGINES, kind=kind, kv_connector=family, **AFFINITY)
    every = sessions("Be brief.", named)
    await play(here, every)
    assert kept(every) >= 0.95
    used = {session.engines[-1] for session in every}
    assert len(used) > 1


@pytest.mark.parametrize("named", ["x-session-id", "x-mine"])
async def test_a_named_session_keeps_its_engine_though_its_turns_share_nothing(
    site: Open, named: str
) -> None:
    here = await site(0, ENGINES, kv_connector="openai", session_key="X-Mine", **AFFINITY)
    engines: dict[str, set[str]] = {}
    for turn in range(3):
        for number in range(SESSIONS):
            body = {"model": "m", "prompt": f"{number} {turn}", "max_tokens": 2}
            status, fields, _ = await here.post(body, **{named: f"session {number}"})
            assert status == 200
            engines.setdefault(f"{number}", set()).add(fields["x-kvrouter-decode"])
    assert all(len(each) == 1 for each in engines.values())
    assert len(set.union(*engines.values())) > 1


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_what_one_engine_answers_goes_to_the_engine_that_has_its_prefix(
    site: Open, path: str
) -> None:
    def prepare(made: list[FakeEngine]) -> None:
        offer(made, saying(200, {"usage": {"output_tokens": 4}}), path)

    here = await site(0, ENGINES, prepare=prepare, **AFFINITY)
    every = sessions("Be brief.", "")
    await play(here, every, path)
    assert kept(every) >= 0.95
    assert len({session.engines[-1] for session in every}) > 1


@pytest.mark.parametrize(
    ("page", "learns"),
    [
        (saying(200, {"usage": {"output_tokens": 4}}), True),
        (saying(400, {"error": {"message": "no", "code": 400}}), False),
        (streaming({"type": "a"}, name=b"content_block_delta", dies=True), True),
        (drop, False),
    ],
    ids=["computed", "refused", "begun", "broken"],
)
async def test_only_what_an_engine_has_computed_counts_as_there(
    site: Open, page: Page, learns: bool
) -> None:
    here = await site(0, 2, policy="prefix", prepare=lambda made: offer(made, page, MESSAGES))
    asked = {"model": "m", "messages": [{"role": "user", "content": "x" * 2000}], "max_tokens": 4}
    with contextlib.suppress(aiohttp.ClientError):
        await here.post(asked, MESSAGES)
    assert (len(here.app.core.index) > 0) == learns


CLIENTS, ANSWERS, WARM = 48, 480, 96  # one request is a twelfth of an engine's load


class Pending:
    """A page of chats whose first token comes at once, and whose ends come in random order."""

    def __init__(self) -> None:
        self.draw = random.Random(3)
        self.waiting: list[asyncio.Event] = []
        self.came = asyncio.Event()

    async def page(self, exchange: Exchange) -> None:
        answered = asyncio.Event()
        exchange.start(200, SSE_HEADERS)
        exchange.write(b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
        self.waiting.append(answered)
        self.came.set()
        await answered.wait()
        exchange.write(b"data: [DONE]\n\n")
        exchange.end()

    async def until(self, count: int) -> None:
        while len(self.waiting) < count:
            self.came.clear()
            await self.came.wait()

    def release(self) -> None:
        self.waiting.pop(self.draw.randrange(len(self.waiting))).set()


async def test_a_prefix_of_half_of_the_traffic_makes_no_hot_spot(site: Open) -> None:
    pending, draw = Pending(), random.Random(2)
    here = await site(
        0,
        ENGINES,
        kv_connector="openai",
        prepare=lambda made: offer(made, pending.page, CHAT),
        **AFFINITY,
    )

    def words(count: int) -> str:
        return " ".join(f"{draw.randrange(10**6):06}" for _ in range(count))

    hot = words(1700)  # of 3,000 tokens

    async def client() -> None:
        while True:
            system = hot if draw.random() < 0.5 else words(1700)
            turn = [
                {"role": "system", "content": system},
                {"role": "user", "content": words(60)},
            ]
            body = {"model": "m", "messages": turn, "max_tokens": 100, "stream": True}
            assert (await here.post(body, CHAT))[0] == 200

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        tasks = [group.create_task(client()) for _ in range(CLIENTS)]
        ratios = []
        for _ in range(ANSWERS):
            await pending.until(CLIENTS)
            tokens = [engine.tokens for engine in here.app.core.pool.all()]
            ratios.append(max(tokens) * len(tokens) / sum(tokens))
            pending.release()
        for task in tasks:
            task.cancel()

    assert sum(ratios[WARM:]) / len(ratios[WARM:]) <= 1.35
