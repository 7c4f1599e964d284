"""The engine's tokens are the same whether KV was loaded or computed, whatever fails meanwhile."""

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch.caches import DEVICE, PATIENT_S, WAIT_S

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.torch_engine.generation import Engine, Generated, GenerateRequest
from kvrouter_store.torch_engine.model import Model
from kvrouter_store.torch_engine.settings import EngineSettings

pytestmark = pytest.mark.torch
BLOCK, CHUNK = 16, 64
CACHES, DTYPES = ("contiguous", "paged"), ("float32", "bfloat16")
Start = Callable[..., Engine]


def prompt(tokens: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1500) for _ in range(tokens)]


def asked(tokens: list[int], answer_tokens: int = 12, **more: Any) -> GenerateRequest:
    return GenerateRequest(tokens, answer_tokens, ignore_eos=True, **more)


def blocks_of(answer: Generated) -> int:
    assert answer.transfer is not None
    found: int = answer.transfer["kvstore"]["blocks"]
    return found


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    """Starts engines in this process, ended with the test."""
    engines: list[Engine] = []

    def start(store: str = "", **flags: Any) -> Engine:
        sizes = {"block_tokens": BLOCK, "chunk_tokens": CHUNK, "max_model_len": 1024}
        usual = {**sizes, "deadline_s": PATIENT_S, "device": DEVICE}
        settings = EngineSettings(str(model), store=store, **{**usual, **flags})
        engines.append(Engine(settings, Model.load(settings)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", CACHES)
def test_tokens_are_the_same_cold_and_warm(start: Start, url: str, dtype: str, cache: str) -> None:
    alone = start(dtype=dtype, cache=cache)
    prefill = start(url, dtype=dtype, cache=cache, role="prefill")
    decode = start(url, dtype=dtype, cache=cache, role="decode")
    first = prompt(200)
    prompts = [first, first[:150] + prompt(100, seed=2), first + prompt(75, seed=3), first[:128]]
    expected = [alone.generate(asked(each)).tokens for each in prompts]
    assert len(set(map(tuple, expected))) == len(prompts)  # they depend on the prompt
    cold = [prefill.generate(asked(each)) for each in prompts]
    assert [each.tokens for each in cold] == expected
    assert [each.cached_tokens for each in cold] == [0, 128, 192, 64]
    assert [blocks_of(each) for each in cold] == [12, 12, 16, 8]
    warm = [decode.generate(asked(each)) for each in prompts]
    assert [each.tokens for each in warm] == expected
    assert [each.cached_tokens for each in warm] == [192, 192, 256, 64]


def test_caches_of_both_kinds_share_blocks(start: Start, url: str) -> None:
    paged, contiguous = start(url, cache="paged"), start(url, cache="contiguous")
    one, other = prompt(130, seed=4), prompt(130, seed=5)
    for puts, gets, tokens in ((paged, contiguous, one), (contiguous, paged, other)):
        put, got = puts.generate(asked(tokens)), gets.generate(asked(tokens))
        assert got.cached_tokens == 128
        assert got.tokens == put.tokens


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"chunk_tokens": 32}])
def test_engines_that_round_otherwise_share_nothing(
    start: Start, url: str, other: dict[str, Any]
) -> None:
    tokens = prompt(130)
    start(url).generate(asked(tokens))
    assert start(url, **other).generate(asked(tokens)).cached_tokens == 0


def test_a_salt_keeps_prompts_apart(start: Start, url: str) -> None:
    engine, tokens = start(url), prompt(130)
    engine.generate(asked(tokens))
    assert engine.generate(asked(tokens, cache_salt="s")).cached_tokens == 0
    assert engine.generate(asked(tokens, cache_salt="s")).cached_tokens == 128


def test_early_layers_are_stored_before_the_last_one_is_computed(
    start: Start, url: str, node: StoreServer
) -> None:
    engine = start(url)
    engine.generate(asked(prompt(10)))  # connects
    layers = list(engine.model.layers)
    part_bytes = engine.sharing.manifest.parts[0].block_bytes if engine.sharing else 0
    before, seen = node.stats()["bytes_in_total"], list[int]()

    def look(*_: object) -> None:
        """Before the last layer computes: until the others are in the store."""
        end = time.monotonic() + WAIT_S
        wanted = (len(layers) - 1) * CHUNK // BLOCK * part_bytes * (len(seen) + 1)
        while (came := node.stats()["bytes_in_total"] - before) < wanted:
            assert time.monotonic() < end, (came, wanted)
        seen.append(came)

    hook = layers[-1].register_forward_pre_hook(look)
    answer = engine.generate(asked(prompt(CHUNK, seed=6), answer_tokens=1))
    hook.remove()
    assert seen
    assert blocks_of(answer) == CHUNK // BLOCK


def test_a_corrupt_block_is_computed_again_and_stored_again(
    start: Start, url: str, node: StoreServer
) -> None:
    engine, tokens = start(url), prompt(200, seed=7)
    cold = engine.generate(asked(tokens))
    spoil(node, url, engine, tokens, block=5, part=2)
    again = engine.generate(asked(tokens))
    assert again.tokens == cold.tokens
    assert again.cached_tokens == 64  # block 5 is in the second chunk
    assert blocks_of(again) == 12
    assert engine.generate(asked(tokens)).cached_tokens == 192
    assert node.stats()["corrupt_total"] == 0  # none was put: the engine has found it


def spoil(
    node: StoreServer, url: str, engine: Engine, tokens: list[int], *, block: int, part: int
) -> None:
    """Change a byte of one layer of one block in the store's memory."""
    assert engine.sharing is not None
    hashes = engine.sharing.names(tokens, None).data
    manifest = engine.sharing.manifest
    with StoreClient(url) as client, client.acquire(manifest, hashes, part) as lease:
        held = bytes(lease.view(block, part))
    pool = ctypes.string_at(node.pool_address, node.stats()["pool_bytes"])
    assert pool.count(held) == 1
    byte = ctypes.c_ubyte.from_address(node.pool_address + pool.index(held) + 7)
    byte.value ^= 0xFF


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("when", ["before", "while it computes the prompt", "while it answers"])
def test_a_store_that_dies_changes_no_token_and_holds_up_nothing(
    start: Start, url: str, node: StoreServer, cache: str, when: str
) -> None:
    tokens = prompt(260, seed=8)
    expected = start(cache=cache).generate(asked(tokens)).tokens
    engine = start(url, cache=cache)
    engine.generate(asked(prompt(10)))  # connects
    begun = time.monotonic()
    if when == "before":
        node.stop()

    def go_on(_token: int) -> bool:
        if when == "while it answers":
            node.stop()
        return True

    hook = engine.model.layers[2].register_forward_hook(lambda *_: node.stop())
    if when != "while it computes the prompt":
        hook.remove()
    answer = engine.generate(asked(tokens), go_on)
    hook.remove()
    assert answer.tokens == expected
    assert engine.generate(asked(tokens)).tokens == expected
    assert time.monotonic() - begun < 30


def test_a_store_that_comes_later_is_used(start: Start, url: str, node: StoreServer) -> None:
    port = node.port
    node.stop()
    engine, tokens = start(url), prompt(130)
    expected = engine.generate(asked(tokens))
    assert blocks_of(expected) == 0
    later = StoreServer(port=port, pool_bytes=64 << 20)
    later.start()
    try:
        end = time.monotonic() + WAIT_S
        while blocks_of(engine.generate(asked(tokens))) == 0:
            assert time.monotonic() < end
        warm = engine.generate(asked(tokens))
        assert warm.cached_tokens == 128
        assert warm.tokens == expected.tokens
    finally:
        later.stop()


def test_a_full_store_takes_what_it_can_and_the_report_says_so(start: Start) -> None:
    small = StoreServer(pool_bytes=1 << 20)
    small.start()
    try:
        engine = start(f"kv://127.0.0.1:{small.port}")
        with closing(StoreClient(f"kv://127.0.0.1:{small.port}")) as client:
            tokens = prompt(900, seed=9)
            answer = engine.generate(asked(tokens))
            assert engine.sharing is not None
            names = engine.sharing.names(tokens, None)
            assert blocks_of(answer) >= client.match(engine.sharing.manifest, names.data).blocks
            assert answer.tokens == engine.generate(asked(tokens)).tokens
    finally:
        small.stop()


def test_pages_come_back_after_every_request(start: Start, url: str) -> None:
    engine, tokens = start(url, cache="paged"), prompt(600, seed=10)
    expected = engine.generate(asked(tokens)).tokens

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = engine.model.layers[1].register_forward_hook(fail)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate(asked(prompt(600, seed=11)))
    hook.remove()
    for _ in range(3):
        assert engine.generate(asked(tokens)).tokens == expected


def test_a_caller_ends_the_answer(start: Start) -> None:
    engine, seen = start(), list[int]()

    def go_on(token: int) -> bool:
        seen.append(token)
        return len(seen) < 3

    answer = engine.generate(asked(prompt(20)), go_on)
    assert answer.tokens == seen
    assert len(seen) == 3


def test_draws_depend_on_the_seed_alone(start: Start) -> None:
    engine, tokens = start(), prompt(20)

    def drawn(seed: int) -> list[int]:
        return engine.generate(asked(tokens, temperature=5.0, seed=seed)).tokens

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_revision_names_weights_options_and_type(start: Start, model: Path) -> None:
    one, other = start(), start(dtype="bfloat16")
    assert one.model.revision == start().model.revision != other.model.revision
    assert torch.float32 == one.model.network.dtype
