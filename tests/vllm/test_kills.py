"""Real vLLM engines that are killed, one of each role, while streams run: every token comes.

The tokens are those of an engine that nothing happened to.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.vllm.asking import WORDS, Question, answer, difference, reference, token_prompt
from tests.vllm.engines import Engine, EngineOptions, ask, running, transfer_config
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service, start_router, start_store

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.tested("vllm", "engines killed amid streams", "engines"),
]

STREAMS, TOKENS, BEGUN_TOKENS = 6, 200, 60
FLAGS = ("--resume-streams", "--policy", "round_robin", "--landing-timeout", "30")
DEADLINE_S = 10.0  # of the connector: a crowded machine is no store that is away


@dataclass
class Cluster:
    """Engines behind a router, and one that nothing happens to."""

    router: Service
    prefill: Engine
    decode: list[Engine]


@pytest.fixture(scope="module")
def cluster(vllm_python: Path, site: Path | None, engine_folder: Path) -> Iterator[Cluster]:
    folder, model = engine_folder, model_folder(TINY, vllm_python)
    store = start_store(folder, name="store-kills")

    def engine(name: str, core: str, role: str) -> Engine:
        transfer = transfer_config(store.url, role, name=name, deadline_s=DEADLINE_S)
        options = EngineOptions(f"kills-{name}", model, core, transfer)
        return Engine.start(vllm_python, options, folder, site)

    engines = [
        engine("prefill", "0", "kv_producer"),
        engine("decode-0", "0", "kv_consumer"),
        engine("decode-1", "1", "kv_consumer"),
    ]
    try:
        with running(engines):
            prefill, *decode = engines
            urls = [each.url for each in decode]
            router = start_router(folder, [prefill.url], urls, store.url, FLAGS)
            try:
                yield Cluster(router, prefill, decode)
            finally:
                router.stop()
    finally:
        store.stop()


def streams(seed: int) -> list[Question]:
    """Streams of some length, cold by a salt of their own; every second one is a chat."""
    draw = random.Random(seed)

    def stream(k: int) -> Question:
        size, chat = draw.choice([40, 300, 900]), k % 2 == 1
        prompt: list[int] | list[dict[str, str]] = token_prompt(draw, size)
        if chat:
            words = " ".join(draw.choice(WORDS) for _ in range(size // 3))
            prompt = [{"role": "user", "content": words}]
        salt = f"kills {seed}"
        return Question(f"stream-{k}", prompt, chat, stream=True, max_tokens=TOKENS, salt=salt)

    return [stream(k) for k in range(STREAMS)]


def kill(engine: Engine) -> None:
    """SIGKILL all of its processes, as a machine that loses power."""
    os.killpg(engine.process.pid, signal.SIGKILL)
    engine.process.wait(30)


def said(engine: Engine) -> float:
    """Tokens that it has generated so far."""
    return engine.counters()["vllm:generation_tokens_total"]


def resumed(router: Service) -> int:
    """Streams that went on elsewhere."""
    page = ask(router.address, "GET", "/metrics", None, 10.0)[1].decode()
    name = 'kvrouter:streams_broken_total{outcome="resumed"} '
    return sum(int(float(x[len(name) :])) for x in page.splitlines() if x.startswith(name))


def test_streams_outlive_their_decode_engine_token_for_token(cluster: Cluster) -> None:
    questions = streams(1)
    expected = [reference(cluster.decode[1].address, question) for question in questions]
    victim = cluster.decode[0]
    before = said(victim)
    with ThreadPoolExecutor(len(questions)) as pool:
        waiting = [pool.submit(answer, cluster.router.address, one) for one in questions]
        until = time.monotonic() + 120
        while said(victim) < before + BEGUN_TOKENS and time.monotonic() < until:
            time.sleep(0.02)
        kill(victim)
        got = [one.result() for one in waiting]
    assert [difference(*pair) for pair in zip(expected, got, strict=True)] == [""] * len(got)
    assert [one.prompt_tokens for one in got] == [one.prompt_tokens for one in expected]
    assert resumed(cluster.router) >= 1


def test_a_prefill_engine_that_is_killed_costs_no_stream(cluster: Cluster) -> None:
    questions = streams(2)
    expected = [reference(cluster.decode[1].address, question) for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        waiting = [pool.submit(answer, cluster.router.address, one) for one in questions]
        kill(cluster.prefill)
        got = [one.result() for one in waiting]
    assert [difference(*pair) for pair in zip(expected, got, strict=True)] == [""] * len(got)
