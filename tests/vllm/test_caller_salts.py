"""Two tenants before real engines: each finds its own prompts, and none of the other's."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import (
    BLOCK_TOKENS,
    Engine,
    EngineOptions,
    ask,
    running,
    transfer_config,
)
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service, start_router, start_store

from kvrouter.credentials.caller_keys import file_line, new_key

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.tested("vllm", "a cache_salt for each tenant", "engines"),
]
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Fleet:
    """Two engines, and a router with two callers, by name."""

    router: Service
    engines: list[Engine]
    keys: dict[str, str]

    def ask(self, caller: str, path: str, **body: Any) -> None:
        asked = {"model": "tiny", "max_tokens": 1, "temperature": 0, **body}
        key = self.keys[caller]
        status, answer = ask(self.router.address, "POST", path, asked, DEADLINE_S, key)
        assert status == 200, answer[:300]

    def computed(self) -> int:
        return sum(engine.prompt_tokens().get("local_compute", 0) for engine in self.engines)


@pytest.fixture(scope="module")
def here(vllm_python: Path, site: Path | None, engine_folder: Path) -> Iterator[Fleet]:
    folder = engine_folder / "salts"
    folder.mkdir()
    keys = {name: new_key() for name in ("one", "two")}
    file = folder / "keys.yaml"
    file.write_text("\n".join(file_line(name, key) for name, key in keys.items()))
    model, store = model_folder(TINY, vllm_python), start_store(folder, memory="512MiB")
    router: Service | None = None

    def engine(name: str, core: str) -> Engine:
        transfer = transfer_config(store.url, name=name, deadline_s=10.0)
        flags = ["--enable-scale-out"]  # responses and messages have both legs
        options = EngineOptions(name, model, core, transfer, flags, kv_bytes="256M")
        return Engine.start(vllm_python, options, folder, site)

    prefill, decode = engines = [engine("prefill", "0"), engine("decode", "1")]
    try:
        with running(engines):
            flags = ["--api-key-file", str(file), "--salt-from-key"]
            router = start_router(folder, [prefill.url], [decode.url], store.url, flags)
            for each in engines:
                router.wait_log(f"engine {each.address} joins")
            yield Fleet(router, engines, keys)
    finally:
        if router is not None:
            router.stop()
        store.stop()


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(str(rng.randrange(10_000)) for _ in range(count))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": random.Random(1).choices(range(3, 1000), k=700)}),
        ("/v1/completions", {"prompt": words(2, 200)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words(3, 200)}]}),
        ("/v1/responses", {"input": words(4, 200), "max_tokens": None, "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": words(5, 200)}]}),
    ],
    ids=["token ids", "text", "chat", "response", "message"],
)
def test_what_a_tenant_has_asked_is_reused_by_it_alone(
    here: Fleet, path: str, body: dict[str, Any]
) -> None:
    computed = []
    for caller in ("one", "one", "two", "two"):
        before = here.computed()
        here.ask(caller, path, **{k: v for k, v in body.items() if v is not None})
        computed.append(here.computed() - before)
    cold, again, other, other_again = computed
    assert cold == other > 4 * BLOCK_TOKENS
    assert again == other_again < 3 * BLOCK_TOKENS
