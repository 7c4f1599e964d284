"""Real vLLM engines in several forms, one store, and a client that notes when each token came."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.vllm.engines import ON_GPU, Engine, EngineOptions, running, transfer_config
from tests.vllm.install import install_into
from tests.vllm.models import MID, TINY, model_folder
from tests.vllm.services import Service

SEVEN_B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 40960,
}
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2 if ON_GPU else 16 << 10  # of KV
STEP_TOKENS = 8192
WARM_TOKENS = 2048 if ON_GPU else 1024  # of the longest prompt before all others
SPARE_TOKENS = 512  # of a cache: vLLM keeps a block, and rounds
LANDED_S, RESET_S = 0.25, 20.0
DEADLINE_S = 600.0
FORMS = ("none", "store", "packed", "other", "native") if ON_GPU else ("none", "store", "other")
"""none: no connector. store, other: engines on the store. packed: so, with a block of all layers in
one piece. native: vLLM's own offloading to host memory, which it has for devices alone."""


class Wrong(Exception):
    """An answer differs or is an error, or a prompt was not loaded."""


@dataclass(frozen=True)
class Answer:
    """The token ids of an answer, and when it was asked for and each event came."""

    begun_s: float
    came_s: list[float]
    tokens: list[int]

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token."""
        return self.came_s[0] - self.begun_s


@dataclass(frozen=True)
class Rig:
    """Starts engines in its folder. host_bytes: of vLLM's own offloading."""

    python: Path
    folder: Path
    store: Service
    host_bytes: int

    @contextmanager
    def engines(self, kv_tokens: int, *names: str) -> Iterator[dict[str, Engine]]:
        """Engines of these forms ('native 2': another one), each with a cache for so many tokens.

        Each has answered a few prompts, and its cache is empty.
        """
        model = self._model()
        options = [self._options(name, model, kv_tokens) for name in names]
        site = install_into(self.python)
        started = {
            each.name: Engine.start(self.python, each, self.folder, site) for each in options
        }
        with running(list(started.values())):
            asyncio.run(warm(list(started.values()), min(kv_tokens // 4, WARM_TOKENS)))
            yield started

    def landed(self) -> None:
        """Return once the store takes no more blocks."""
        before = -1
        while (now := self.store.stats()["commits_total"]) != before:
            before = now
            time.sleep(LANDED_S)

    def _options(self, name: str, model: Path, kv_tokens: int) -> EngineOptions:
        form = name.partition(" ")[0]
        environment, transfer = {"VLLM_SERVER_DEV_MODE": "1"}, None
        flags = ["--load-format", "dummy", "--max-num-batched-tokens", str(STEP_TOKENS)]
        flags += ["--no-enforce-eager"] if ON_GPU else []
        if form == "native":
            gibibytes = str(max(1, self.host_bytes >> 30))
            flags += ["--kv-offloading-size", gibibytes, "--kv-offloading-backend", "native"]
        elif form != "none":
            transfer = transfer_config(self.store.url, name=name, weights_revision="dummy")
            del transfer["kv_connector_extra_config"]["cpu_bytes_to_use"]  # what a user has
        if form == "packed":
            environment["VLLM_KV_CACHE_LAYOUT"] = "BLHNC"
        return EngineOptions(
            name,
            model,
            "1" if form == "other" or name != form else "0",
            transfer,
            flags,
            block_tokens=0,
            max_tokens=min(kv_tokens, SEVEN_B["max_position_embeddings"] if ON_GPU else 8192),
            kv_bytes=f"{(kv_tokens + SPARE_TOKENS) * TOKEN_BYTES >> 20}M",
            environment=environment,
        )

    def _model(self) -> Path:
        """For a GPU a configuration of 7B without weights."""
        if not ON_GPU:
            return model_folder(MID, self.python)
        large = self.folder / "model"
        if large.is_dir():
            return large
        large.mkdir()
        for file in model_folder(TINY, self.python).iterdir():
            if file.suffix != ".safetensors":
                (large / file.name).write_bytes(file.read_bytes())
        config = json.loads((large / "config.json").read_text())
        config |= SEVEN_B | {"layer_types": ["full_attention"] * SEVEN_B["num_hidden_layers"]}
        (large / "config.json").write_text(json.dumps(config))
        return large


def prompts(seed: int | str, count: int, tokens: int) -> list[list[int]]:
    """Random ones, without special tokens: no two begin with the same block."""
    draw = random.Random(seed)
    return [[draw.randrange(300, 2000) for _ in range(tokens)] for _ in range(count)]


async def ask(
    http: aiohttp.ClientSession,
    address: str,
    prompt: Sequence[int],
    max_tokens: int = 1,
    into: list[Answer] | None = None,
    **more: Any,
) -> Answer:
    """A streamed completion, with `more` in its body; `into` has it from its beginning."""
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **more,
    }
    answer = Answer(time.monotonic(), [], [])
    if into is not None:
        into.append(answer)
    async with http.post(f"http://{address}/v1/completions", json=body) as response:
        if response.status != 200:
            raise Wrong(f"{address}: {response.status} {(await response.text())[:500]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                ids = [i for c in json.loads(line[6:])["choices"] for i in c.get("token_ids") or ()]
                answer.tokens.extend(ids)
                answer.came_s.extend([time.monotonic()] * bool(ids))
    return answer


def client() -> aiohttp.ClientSession:
    """A session without a bound on connections."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def ask_all(
    address: str, asked: Sequence[Sequence[int]], max_tokens: int = 1, **more: Any
) -> list[Answer]:
    """All at once."""
    async with client() as http:
        answers = (ask(http, address, prompt, max_tokens, **more) for prompt in asked)
        return list(await asyncio.gather(*answers))


async def warm(engines: Sequence[Engine], tokens: int) -> None:
    """The first batches of a process take seconds: of each length, and of a hit."""
    for engine in engines:
        for size in (40, tokens // 4, tokens, tokens):
            await ask_all(engine.address, prompts(size, 1, size), 4)
        await empty(engine.address)
        await ask_all(engine.address, prompts(tokens, 1, tokens), 4)
        await empty(engine.address)


async def empty(address: str) -> None:
    """Empty the engine's own cache, once nothing moves."""
    async with client() as http:
        until = time.monotonic() + RESET_S
        while time.monotonic() < until:
            async with http.post(f"http://{address}/reset_prefix_cache") as response:
                if (await response.json()).get("success"):
                    return
            await asyncio.sleep(LANDED_S)
    raise Wrong(f"{address} does not empty its cache")


def computed(engine: Engine, before: Mapping[str, int] | None = None) -> int:
    """Prompt tokens that an engine has computed, since `before` was taken."""
    key = "local_compute"
    return engine.prompt_tokens().get(key, 0) - (before or {}).get(key, 0)


def external(engine: Engine) -> int:
    """Prompt tokens that an engine has loaded."""
    return engine.prompt_tokens().get("external_kv_transfer", 0)


def figures_of(**values: Any) -> dict[str, Any]:
    """A row, printed at once as JSON."""
    print(json.dumps(values), flush=True)
    return values
