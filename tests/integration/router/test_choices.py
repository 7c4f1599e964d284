"""Several prompts or samples through a router say what one engine alone says, token for token."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.fakes.openai_cases import CHAT, COMPLETIONS, events
from tests.fakes.patience import until
from tests.fakes.store import StoreProcess
from tests.integration.router.conftest import Json

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings
from kvrouter.tools.sim.serve import SimServer
from kvrouter.tools.sim.settings import SimSettings

TEXTS = ["The quick brown fox jumps over", "a lazy dog that sleeps in the sun", "Hi"]
TOKENS = [[7, 8, 9] * 20, [1000 + i for i in range(50)], [5]]


class Simulated:
    """A router before simulated engines, and one such engine that nobody stands before."""

    def __init__(self, router: str, alone: str, http: aiohttp.ClientSession, app: App) -> None:
        self.app = app
        self._urls = {"router": router, "alone": alone}
        self._http = http

    async def ask(self, whom: str, body: Json, path: str) -> tuple[int, bytes]:
        async with self._http.post(self._urls[whom] + path, json=body) as answer:
            return answer.status, await answer.read()

    async def both(self, body: Json, path: str) -> tuple[bytes, bytes]:
        routed, alone = [await self.ask(whom, body, path) for whom in ("router", "alone")]
        assert (routed[0], alone[0]) == (200, 200), (routed, alone)
        return routed[1], alone[1]


Start = Callable[..., Awaitable[Simulated]]


@pytest_asyncio.fixture
async def simulated() -> AsyncIterator[Start]:
    """Starts two engines of each role before a router, with or without a store, and one alone."""
    servers: list[SimServer] = []
    async with AsyncExitStack() as stack:

        async def sim(**settings: Any) -> str:
            whole = {"model": "tiny", "port": 0, "block_size": 16, "seed": 1, **settings}
            server = SimServer(SimSettings(**whole))
            port = await server.start()
            servers.append(server)
            return f"http://127.0.0.1:{port}"

        async def start(store: str | None = None, **settings: Any) -> Simulated:
            connector: Any = "nixl" if store is None else "store"
            engines = {
                role: [await sim(role=role, store=store, **settings) for _ in range(2)]
                for role in ("prefill", "decode")
            }
            app = build(
                RouterSettings(
                    port=0,
                    store=[store] if store is not None else [],
                    policy="round_robin",
                    kv_connector=connector,
                    prefill=engines["prefill"],
                    decode=engines["decode"],
                )
            )
            router = f"http://127.0.0.1:{await app.start()}"
            stack.push_async_callback(app.close)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            return Simulated(router, await sim(**settings), http, app)

        yield start
    await asyncio.gather(*(server.close() for server in servers))


@pytest_asyncio.fixture(params=["a store", "connectors of their own"])
async def here(
    request: pytest.FixtureRequest, simulated: Start, node: StoreProcess
) -> AsyncIterator[Simulated]:
    """Engines that sample by themselves (a store), and such as take one sample per hand-over."""
    here = await simulated(node.url if request.param == "a store" else None)
    yield here
    await until(lambda: all(e.requests == 0 and e.tokens == 0 for e in here.app.core.pool.all()))


def asked(path: str, **more: Any) -> Json:
    prompt = {"messages": [{"role": "user", "content": "Hello there, how are you?"}]}
    if path == COMPLETIONS:
        prompt = {"prompt": TEXTS}  # type: ignore[dict-item]
    return {"model": "tiny", "max_tokens": 20, "ignore_eos": True, **prompt, **more}


USAGE: list[Json | None] = [None, {"include_usage": True}]
WAYS: list[tuple[str, Json, int]] = [  # with the choices that each asks for
    (COMPLETIONS, {}, 3),
    (COMPLETIONS, {"n": 3, "seed": 5}, 9),
    (COMPLETIONS, {"n": 2, "seed": -1, "best_of": 2}, 6),
    (COMPLETIONS, {"prompt": TOKENS, "n": 2, "seed": 5, "return_token_ids": True}, 6),
    (COMPLETIONS, {"prompt": [TOKENS[0]], "temperature": 0}, 1),
    (COMPLETIONS, {"prompt": [TEXTS[0]], "n": 2, "seed": 5}, 2),
    (COMPLETIONS, {"prompt": TEXTS[0], "n": 3, "seed": 2**40}, 3),
    (COMPLETIONS, {"prompt": [TEXTS[0]] * 20, "max_tokens": 2, "temperature": 0}, 20),
    (CHAT, {}, 1),
    (CHAT, {"n": 3, "seed": 5}, 3),
    (CHAT, {"n": 2, "seed": 5, "return_token_ids": True, "max_completion_tokens": 3}, 2),
]


async def test_a_whole_answer_is_that_of_one_engine_alone(here: Simulated) -> None:
    for path, more, choices in WAYS:
        routed, alone = map(json.loads, await here.both(asked(path, **more), path))
        assert routed["choices"] == alone["choices"], more
        assert len(routed["choices"]) == choices, more
        for usage in (routed["usage"], alone["usage"]):
            usage.pop("prompt_tokens_details")  # what each engine had cached before
        assert routed["usage"] == alone["usage"], more
        for key in set(routed) - {"choices", "usage", "id", "created"}:
            assert routed[key] == alone[key], (key, more)
        assert set(alone) - set(routed) <= {"kv_transfer_params"}, more


async def test_a_stream_says_of_each_choice_what_one_engine_alone_says(here: Simulated) -> None:
    for path, more, _ in WAYS:
        for options in USAGE:
            body = asked(path, **more, stream=True, stream_options=options)
            routed, alone = await here.both(body, path)
            assert heard(routed) == heard(alone), (more, options)


def heard(body: bytes) -> Any:
    """What a stream said of each choice, its usage, and what all events had in common."""
    told = events(body)
    usage = [event["usage"] for event in told if not event["choices"]]
    for one in usage:
        one.pop("prompt_tokens_details")
    assert len({event["id"] for event in told}) == 1
    assert len({event["created"] for event in told}) == 1
    said: dict[int, list[Json]] = {}
    for event in told:
        for choice in event["choices"]:
            said.setdefault(choice["index"], []).append(choice)
    return said, usage, {(event["object"], event["model"]) for event in told}


async def test_continuous_usage_is_that_of_one_engine_alone(here: Simulated) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = asked(COMPLETIONS, n=2, seed=1, stream=True, stream_options=options)
    counted = []
    for answer in await here.both(body, COMPLETIONS):
        told: dict[int, list[Json]] = {}
        *chunks, last = events(answer)
        for event in chunks:
            told.setdefault(event["choices"][0]["index"], []).append(event["usage"])
        last["usage"].pop("prompt_tokens_details")
        counted.append((told, last["usage"]))
    assert counted[0] == counted[1]


async def test_what_one_engine_alone_refuses_is_refused_in_its_words(here: Simulated) -> None:
    refused: list[tuple[str, Json]] = [
        (COMPLETIONS, {"n": 2, "temperature": 0}),
        (CHAT, {"n": 2, "temperature": 0}),
        (COMPLETIONS, {"prompt": [TOKENS[1], [7] * 100_000]}),
    ]
    for path, more in refused:
        body = asked(path, **more)
        routed, alone = [await here.ask(whom, body, path) for whom in ("router", "alone")]
        assert routed == alone
        assert routed[0] == 400


async def test_prompts_that_the_store_has_count_as_cached_by_the_prefill_engine(
    simulated: Start, node: StoreProcess
) -> None:
    here = await simulated(node.url)
    body = asked(COMPLETIONS, prompt=[TOKENS[0], TOKENS[1][:40]])
    for cached in (0, 3 * 16 + 2 * 16):
        answer = json.loads((await here.ask("router", body, COMPLETIONS))[1])
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
