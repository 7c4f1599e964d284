"""Engines of other kinds beside the plain ones: they share or refuse, and are never wrong."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.asking import Question, answer, difference, reference, token_prompt
from tests.vllm.engines import BLOCK_TOKENS, Engine, EngineOptions, running, transfer_config
from tests.vllm.models import TINY, WINDOW, Recipe, model_folder
from tests.vllm.services import Service, start_router, start_store

from kvrouter_store.client.blocking import StoreClient

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TWO_RANKS = ("--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def store(engine_folder: Path) -> Iterator[Service]:
    service = start_store(engine_folder, name="store-of-kinds")
    yield service
    service.stop()


class Kinds:
    """Starts engines of one model, with and without the connector."""

    def __init__(self, python: Path, site: Path | None, folder: Path, store: Service) -> None:
        self._python = python
        self._site = site
        self._folder = folder
        self._store = store

    def start(
        self, recipe: Recipe, name: str, core: str, *flags: str, alone: bool = False, **extra: Any
    ) -> Engine:
        transfer = None if alone else transfer_config(self._store.url, name=name, **extra)
        options = EngineOptions(
            name,
            model_folder(recipe, self._python),
            core,
            transfer,
            flags,
            environment={"VLLM_SERVER_DEV_MODE": "1"},
        )
        return Engine.start(self._python, options, self._folder, self._site)

    @contextmanager
    def routed(self, prefill: Engine, decode: Engine) -> Iterator[Service]:
        """A router before two of them, one for each leg."""
        flags = ["--prefill-threshold", "0"]
        router = start_router(self._folder, [prefill.url], [decode.url], self._store.url, flags)
        try:
            for engine, role in ((prefill, "prefill"), (decode, "decode")):
                router.wait_log(f"engine {engine.address} joins as {role}")
            yield router
        finally:
            router.stop()


@pytest.fixture
def kinds(vllm_python: Path, site: Path | None, engine_folder: Path, store: Service) -> Kinds:
    return Kinds(vllm_python, site, engine_folder, store)


def listed_engines(store: Service) -> dict[str, int]:
    """Names of the engines that share, each with the number of parts of its manifest."""
    with StoreClient(store.url) as client:
        return {
            engine: len(registered.manifest.parts)
            for registered in client.manifests()
            for engine in registered.engines
        }


def test_two_ranks_and_one_load_what_the_other_computed(kinds: Kinds, store: Service) -> None:
    single = kinds.start(TINY, "single-of-parts", "0", parts=2, deadline_s=10.0)
    pair = kinds.start(TINY, "pair-of-parts", "0|1", *TWO_RANKS, deadline_s=10.0)
    with running([single, pair]):
        engines = listed_engines(store)
        assert (engines["single-of-parts"], engines["pair-of-parts"]) == (2, 2)
        draw = random.Random(13)
        for prefill, decode in ((pair, single), (single, pair)):
            with kinds.routed(prefill, decode) as router:
                for size in (33, 500, 1500):
                    question = Question(
                        f"{prefill.options.name}-{size}", token_prompt(draw, size), max_tokens=16
                    )
                    # With a salt of its own it is computed: by one rank that has loaded nothing.
                    expected = reference(single.address, replace(question, salt=question.name))
                    before = decode.prompt_tokens()["external_kv_transfer"]
                    assert not difference(expected, answer(router.address, question))
                    loaded = decode.prompt_tokens()["external_kv_transfer"] - before
                    whole = (size - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                    assert loaded == whole, f"{question.name}: {router.tail(4)}"
        assert store.stats()["corrupt_total"] == 0


def test_two_ranks_share_with_two_ranks_and_never_with_one(kinds: Kinds, store: Service) -> None:
    single = kinds.start(TINY, "single", "0")
    pair = kinds.start(TINY, "pair", "0|1", *TWO_RANKS)
    with running([single, pair]):
        engines = listed_engines(store)
        assert (engines["single"], engines["pair"]) == (1, 2)

        question = Question("ranks", token_prompt(random.Random(11), 500), max_tokens=16)
        expected = reference(single.address, question)
        got = answer(pair.address, question)
        assert not difference(expected, got)
        assert pair.prompt_tokens()["external_kv_transfer"] == 0

        assert pair.post("/reset_prefix_cache") == 200
        again = answer(pair.address, question)
        assert not difference(expected, again)
        assert again.cached_tokens == pair.prompt_tokens()["external_kv_transfer"] == 480

        assert single.post("/reset_prefix_cache") == 200
        assert not difference(expected, answer(single.address, question))
        assert single.prompt_tokens()["external_kv_transfer"] == 480


def test_a_sliding_window_model_runs_without_sharing_and_says_so(
    kinds: Kinds, store: Service
) -> None:
    alone = kinds.start(WINDOW, "window-alone", "0", alone=True)
    sharing = kinds.start(WINDOW, "window", "1")
    with running([alone, sharing]):
        assert "not shared" in sharing.log.read_text()
        assert "window" not in listed_engines(store)
        assert store.stats()["refusals_total"] > 0
        draw = random.Random(12)
        for size in (5, 100, 500, 1500):
            question = Question(f"window-{size}", token_prompt(draw, size), max_tokens=16)
            expected = reference(alone.address, question)
            assert not difference(expected, answer(sharing.address, question))
            assert sharing.post("/reset_prefix_cache") == 200
            assert not difference(expected, answer(sharing.address, question))
        assert sharing.prompt_tokens()["external_kv_transfer"] == 0


def test_an_engine_that_cannot_work_names_the_flag_to_set(kinds: Kinds) -> None:
    wrong = kinds.start(TINY, "wrong", "0", "--prefix-caching-hash-algo", "sha256")
    try:
        assert "set --prefix-caching-hash-algo sha256_cbor" in wrong.wait_refused()
    finally:
        wrong.stop()
