"""Real vLLM engines whose decode leg is sent at once, at a chunk, or after the landing.

The decode engine computes nothing of a prompt that is on its way to it, in whatever mode, and its
tokens are those of one engine alone.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.vllm.asking import (
    Question,
    answer,
    answers,
    difference,
    leave_early,
    reference,
    token_prompt,
)
from tests.vllm.engines import BLOCK_TOKENS, Engine, EngineOptions, running, transfer_config
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service, start_router, start_store

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.tested("vllm", "decode legs sent before the KV has landed", "engines"),
]

MODES = ("landing", "chunk", "at-once")
SIZES = (5, 33, 70, 500, 1000, 3000, 3800)
DEADLINE_S = 10.0  # of the connector: a crowded machine is no store that is away


@dataclass
class Cluster:
    """Engines, and a router before them for each mode."""

    routers: dict[str, Service]
    alone: Engine
    prefill: Engine
    decode: Engine


@pytest.fixture(scope="module")
def cluster(vllm_python: Path, site: Path | None, engine_folder: Path) -> Iterator[Cluster]:
    folder, model = engine_folder, model_folder(TINY, vllm_python)
    store = start_store(folder, name="store-dispatch")
    routers: dict[str, Service] = {}

    def engine(name: str, core: str, role: str) -> Engine:
        transfer = (
            transfer_config(store.url, role, name=name, deadline_s=DEADLINE_S) if role else None
        )
        options = EngineOptions(f"dispatch-{name}", model, core, transfer)
        return Engine.start(vllm_python, options, folder, site)

    engines = [
        engine("alone", "0", ""),
        engine("prefill", "0", "kv_producer"),
        engine("decode", "1", "kv_consumer"),
    ]
    try:
        with running(engines):
            alone, prefill, decode = engines
            for mode in MODES:
                flags = ["--decode-dispatch", mode, "--landing-timeout", "30"]
                routers[mode] = start_router(folder, [prefill.url], [decode.url], store.url, flags)
            yield Cluster(routers, alone, prefill, decode)
    finally:
        for router in routers.values():
            router.stop()
        store.stop()


def asked(mode: str, seed: int) -> list[Question]:
    """The same prompts for every mode, each cold by a salt of its own."""
    draw = random.Random(seed)
    return [
        Question(f"{mode}-{size}", token_prompt(draw, size), salt=f"{mode} {seed}")
        for size in SIZES
    ]


@pytest.mark.parametrize("mode", MODES)
def test_one_after_the_other_every_whole_block_is_loaded_and_none_computed(
    cluster: Cluster, mode: str
) -> None:
    questions = asked(mode, 1)
    expected = [reference(cluster.alone.address, question) for question in questions]
    before = cluster.decode.prompt_tokens()
    got = [answer(cluster.routers[mode].address, question) for question in questions]
    after = cluster.decode.prompt_tokens()
    assert [difference(*pair) for pair in zip(expected, got, strict=True)] == [""] * len(got)
    whole = sum((size - 1) // BLOCK_TOKENS * BLOCK_TOKENS for size in SIZES)
    gained = {key: after[key] - before.get(key, 0) for key in after}
    assert gained["external_kv_transfer"] == whole
    assert gained["local_compute"] == sum(SIZES) - whole


@pytest.mark.parametrize("mode", MODES)
def test_many_at_once_and_some_that_leave_have_the_tokens_of_one_engine_alone(
    cluster: Cluster, mode: str
) -> None:
    questions = asked(mode, 2) + asked(mode, 3)
    expected = [reference(cluster.alone.address, question) for question in questions]
    with ThreadPoolExecutor(4) as others:
        leaving = asked(f"{mode} leaving", 4)
        left = [others.submit(leave_early, cluster.routers[mode].address, one) for one in leaving]
        got = answers(cluster.routers[mode].address, questions, 8)
        for one in left:
            one.result()
    assert [difference(*pair) for pair in zip(expected, got, strict=True)] == [""] * len(got)


def test_a_prefill_engine_that_is_killed_costs_no_request(cluster: Cluster) -> None:
    questions = [question for mode in MODES for question in asked(mode, 5)]
    expected = [reference(cluster.alone.address, question) for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        waiting = [
            pool.submit(answer, cluster.routers[question.name.rpartition("-")[0]].address, question)
            for question in questions
        ]
        waiting[0].result()
        cluster.prefill.stop()
        got = [one.result() for one in waiting]
    other = {
        question.name: (difference(want, have), have.tokens, want.tokens)
        for question, want, have in zip(questions, expected, got, strict=True)
        if difference(want, have)
    }
    assert not other, f"the decode engine said other tokens (what, got, expected): {other}"
