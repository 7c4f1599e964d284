"""Store, simulated engines and router as processes: nothing is made up but the arithmetic."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionUserMessageParam
from tests.fakes.patience import until

from kvrouter.tools.demo.children import Child, Children
from kvrouter.tools.demo.run import Counted
from kvrouter.tools.sim.kv_bytes import Oracle
from kvrouter.tools.sim.settings import SimSettings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SIM = SimSettings(model="tiny", block_size=16, kv_bytes_per_token=256)
ORACLE = Oracle(SIM.manifest)
BLOCK = SIM.block_size
MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Who is there?"}]


@dataclass
class Cluster:
    """Everything that runs, and a client of the router."""

    children: Children
    folder: Path
    store: Child
    prefill: list[Child]
    decode: list[Child]
    router: Child
    session: aiohttp.ClientSession
    client: openai.AsyncOpenAI

    async def counted(self, engines: list[Child]) -> Counted:
        """What engines say of their prompt tokens, summed."""
        total = Counted()
        for engine in engines:
            async with self.session.get(f"{engine.http}/metrics") as answer:
                total += Counted.read(await answer.text())
        return total

    async def stat(self, name: str) -> int:
        """A number of the store's /stats."""
        async with self.session.get(f"{self.store.http}/stats") as answer:
            return int((await answer.json())[name])

    async def start_store(self, name: str) -> None:
        """The store again, at the address that everybody knows."""
        port = self.store.urls["kv"].rpartition(":")[2]
        self.store = await _store(self.children, self.folder, name, port)


async def _store(children: Children, folder: Path, name: str, port: str) -> Child:
    return await children.start(
        name,
        *("store", "--port", port, "--http-port", "0", "--memory", "64MiB"),
        *("--unix-socket", str(folder / "store.sock")),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("path")
    async with Children(folder) as children, aiohttp.ClientSession() as session:
        store = await _store(children, folder, "store", "0")
        common = (
            *("--port", "0", "--model", "tiny", "--block-size", str(BLOCK)),
            *("--kv-bytes-per-token", "256", "--store", store.urls["kv"]),
            *("--store-deadline", "500ms", "--inter-token-latency", "1ms"),
        )
        engines = await asyncio.gather(
            *(
                children.start(f"{role}-{at}", "sim", "--role", role, *common)
                for role in ("prefill", "decode")
                for at in range(2)
            )
        )
        prefill, decode = list(engines[:2]), list(engines[2:])
        router = await children.start(
            "router",
            *("serve", "--port", "0", "--store", store.urls["kv"], "--log-level", "warning"),
            *("--prefill", *(engine.http for engine in prefill)),
            *("--decode", *(engine.http for engine in decode)),
        )
        client = openai.AsyncOpenAI(
            base_url=f"{router.http}/v1", api_key="none", max_retries=0, timeout=60
        )
        made = Cluster(children, folder, store, prefill, decode, router, session, client)
        yield made
        await client.close()


def prompts(seed: int, count: int) -> list[list[int]]:
    """Token-id prompts of 5 to 700 tokens; every third begins as another one does."""
    draw = random.Random(seed)
    made: list[list[int]] = []
    for index in range(count):
        begin = made[draw.randrange(index)][: draw.randrange(600)] if index % 3 == 2 else []
        made.append(begin + [draw.randrange(50_000) for _ in range(draw.randint(5, 100))])
    return made


async def say(path: Cluster, prompt: list[int], tokens: int = 8) -> str:
    answer = await path.client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens)
    return answer.choices[0].text


async def test_the_openai_client_gets_what_it_asks_for(path: Cluster) -> None:
    said = await path.client.completions.create(model="tiny", prompt="Hello there", max_tokens=9)
    assert said.choices[0].text == ORACLE.text(ORACLE.tokenizer.encode("Hello there"), 9)
    assert said.usage is not None
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (6, 9)
    chat = await path.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=9,
    )
    expected = ORACLE.text(ORACLE.tokenizer.render_chat(MESSAGES), 9)
    assert chat.choices[0].message.content == expected
    stream = await path.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage = [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == expected
    assert usage is not None
    assert usage.completion_tokens == 9
    assert [model.id async for model in path.client.models.list()] == ["tiny"]


async def test_the_openai_client_gets_the_reason_of_an_error(path: Cluster) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await path.client.completions.create(model="nobody", prompt="Hello", max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await path.client.completions.create(
            model="tiny", prompt="Hello", max_tokens=1, temperature=7
        )
    with pytest.raises(openai.BadRequestError, match="n"):
        await path.client.completions.create(model="tiny", prompt="Hello", max_tokens=1, n=0)


async def test_what_engines_serve_for_agents_comes_through_and_the_rest_is_named(
    path: Cluster,
) -> None:
    said = await path.client.responses.create(model="tiny", input="Hello there")
    assert said.output_text
    with pytest.raises(openai.NotFoundError) as refused:
        await path.client.embeddings.create(model="tiny", input="Hello there")
    assert refused.value.code == "endpoint_not_served"


async def test_many_prompts_are_computed_once_and_said_right(path: Cluster) -> None:
    asked = prompts(seed=1, count=64)
    before = await path.counted(path.decode)
    room = asyncio.Semaphore(16)

    async def one(prompt: list[int]) -> str:
        async with room:
            return await say(path, prompt)

    said = await asyncio.gather(*(one(prompt) for prompt in asked))
    assert said == [ORACLE.text(prompt, 8) for prompt in asked]
    gained = await path.counted(path.decode) - before
    assert gained.computed == sum(len(p) - (len(p) - 1) // BLOCK * BLOCK for p in asked)
    assert gained.store > 0
    assert gained.wrong_blocks == 0


async def test_clients_that_leave_leave_nothing_behind(path: Cluster) -> None:
    for prompt in prompts(seed=2, count=12):
        stream = await path.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=2000, stream=True
        )
        async for _ in stream:
            break
        await stream.close()

    async def is_idle() -> bool:
        waits = await running(path) or await path.stat("leases") or await path.stat("waits")
        return not waits

    await until(is_idle, look_s=0.05)
    assert await path.stat("reserved_blocks") == 0


async def running(path: Cluster) -> float:
    """Requests that engines still run."""
    total = 0.0
    for engine in (*path.prefill, *path.decode):
        async with path.session.get(f"{engine.http}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        total += sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:num_requests_run"))
    return total


async def test_requests_go_on_while_the_store_is_dead_and_use_it_when_it_is_back(
    path: Cluster,
) -> None:
    asked = prompts(seed=3, count=24)
    under_way = [asyncio.create_task(say(path, prompt)) for prompt in asked[:12]]
    await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    await path.children.kill(path.store)
    said = await asyncio.gather(*under_way)
    said += [await say(path, prompt) for prompt in asked[12:]]
    assert said == [ORACLE.text(prompt, 8) for prompt in asked]
    await path.start_store("store-again")
    before = await path.counted(path.decode)
    fresh = iter(range(10_000))
    async with asyncio.timeout(60):
        while (await path.counted(path.decode) - before).store == 0:
            prompt = [60_000 + next(fresh), *range(3 * BLOCK)]
            assert await say(path, prompt) == ORACLE.text(prompt, 8)


async def test_a_dead_decode_engine_is_replaced_before_anybody_notices(path: Cluster) -> None:
    await path.children.kill(path.decode[0])
    asked = prompts(seed=4, count=12)
    said = await asyncio.gather(*(say(path, prompt) for prompt in asked))
    assert said == [ORACLE.text(prompt, 8) for prompt in asked]
