"""Two tenants before real engines: each finds its own prompts, and none of the other's."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.caller_salts import Fleet, fleet
from tests.vllm.engines import BLOCK_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def here(vllm_python: Path, site: Path | None, engine_folder: Path) -> Iterator[Fleet]:
    folder = engine_folder / "salts"
    folder.mkdir()
    with fleet(vllm_python, folder, salted=True) as started:
        yield started


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
