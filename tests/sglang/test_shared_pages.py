"""HiCache of real SGLang engines over a store node: what one has computed, the other loads."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fakes.patience import eventually
from tests.sglang.engine import LOADER
from tests.sglang.engines import (
    PAGE_TOKENS,
    PATIENCE_S,
    StartEngine,
    page_keys,
    request_lines,
    until_idle,
)
from tests.vllm.asking import Question, answer, difference, reference, token_prompt
from tests.vllm.engines import Engine, free_port, running
from tests.vllm.services import Service, start_router, start_store

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.sglang.shelf import names_of

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.tested("sglang", "KV by the store", "engines"),
    pytest.mark.tested("sglang", "KV events of host memory", "engines"),
]

SIZES = (300, 1000, 2001)
KV_TOKENS = 4000


@dataclass(frozen=True)
class Shared:
    """Two engines over one store, and a router that hears of the first one's pages."""

    store: Service
    one: Engine
    other: Engine
    router: Service


def hicache(url: str) -> list[str]:
    """The flags of docs/sglang-hicache.md; a prompt waits until its pages are loaded."""
    extra = {**LOADER, "interface_v1": 1, "hicache_storage_pass_prefix_keys": True, "url": url}
    return [
        *("--enable-hierarchical-cache", "--hicache-mem-layout", "page_first"),
        *("--hicache-ratio", "2", "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    ]


@pytest.fixture(scope="module")
def shared(start_engine: StartEngine, engine_folder: Path) -> Iterator[Shared]:
    store, events = start_store(engine_folder), f"tcp://127.0.0.1:{free_port()}"
    flags = hicache(store.url)
    one = start_engine("hicache-one", flags=flags, events=events, kv_tokens=KV_TOKENS)
    other = start_engine("hicache-other", flags=flags, kv_tokens=KV_TOKENS)
    try:
        with running([one, other]):
            told = ["--kv-events-bind", events]
            router = start_router(engine_folder, [], [one.url], None, told)
            try:
                router.wait_log(f"engine {one.address} joins")
                yield Shared(store, one, other, router)
            finally:
                router.stop()
    finally:
        store.stop()


def whole_pages(tokens: int) -> int:
    """Tokens of a prompt that need not be computed: all full pages, but never the last token."""
    return (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def has_all(store: Service, prompt: Sequence[int]) -> bool:
    """Whether the store has a prompt's pages, by the names that SGLang gives them."""
    with StoreClient(store.url) as client:
        (registered,) = client.manifests()
        return all(client.held(registered.manifest, names_of(page_keys(prompt))))


@pytest.mark.parametrize("size", SIZES)
def test_pages_that_one_engine_computed_are_loaded_by_another(size: int, shared: Shared) -> None:
    prompt = token_prompt(random.Random(size), size)
    question = Question("shared", prompt, max_tokens=16)
    expected = reference(shared.one.address, question)
    assert expected.cached_tokens == 0
    assert eventually(lambda: has_all(shared.store, prompt), PATIENCE_S)
    got = answer(shared.other.address, question)
    assert got.cached_tokens == whole_pages(size)
    assert not difference(expected, got)


def test_the_router_knows_what_the_engine_has_in_its_host_memory(shared: Shared) -> None:
    """Seven prompts evict each other from its own cache; the first three come again."""
    draw, cached = random.Random(1), list[int]()
    asked = [Question(str(n), token_prompt(draw, 900), max_tokens=1) for n in range(7)]
    for question in [*asked, *asked[:3]]:
        assert until_idle(shared.one)
        cached.append(answer(shared.router.address, question).cached_tokens)
    lines = request_lines(shared.router, len(cached))
    known = [(line["hit_engine_tokens"], line["hit_lower_tokens"]) for line in lines]
    assert known == [(0, tokens) for tokens in cached]
    assert cached == [0] * 7 + [whole_pages(900)] * 3
