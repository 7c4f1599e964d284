"""Real vLLM engines behind router and store: the same tokens as one engine alone, loaded once.

Two prefill engines, one decode engine and, for the reference, one engine without a connector.
"""

import http.client
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.fakes import openai_cases
from tests.fakes.patience import eventually
from tests.vllm import choices, matrix
from tests.vllm.asking import (
    Answer,
    Question,
    answer,
    answers,
    difference,
    is_tie,
    leave_early,
    questions,
    reference,
    token_prompt,
)
from tests.vllm.engines import (
    BLOCK_TOKENS,
    Engine,
    EngineOptions,
    free_port,
    running,
    transfer_config,
)
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service, start_router, start_store

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.tested("vllm", "completions and chats", "engines"),
    pytest.mark.tested("vllm", "KV by the store", "engines"),
]

COMPLETED, AT_ONCE, ABORTED = 72, 16, 12
DEADLINE_S = 10.0  # of the connector: a crowded machine is no store that is away
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}  # offers /reset_prefix_cache


@dataclass
class Cluster:
    """Everything that serves; `alone` is the engine without a connector."""

    store: Service
    router: Service
    alone: Engine
    prefill: list[Engine]
    decode: Engine

    def forget(self, engine: Engine) -> None:
        """Empty an engine's own cache, so that what it holds comes from the store."""
        assert engine.post("/reset_prefix_cache") == 200


@pytest.fixture(scope="module")
def cluster(vllm_python: Path, site: Path | None, engine_folder: Path) -> Iterator[Cluster]:
    folder, model = engine_folder, model_folder(TINY, vllm_python)
    store = start_store(folder)
    events = f"tcp://127.0.0.1:{free_port()}"

    def engine(name: str, core: str, role: str) -> Engine:
        transfer = (
            transfer_config(store.url, role, name=name, deadline_s=DEADLINE_S) if role else None
        )
        options = EngineOptions(
            *(name, model, core, transfer),
            environment=DEVELOPER,
            events=events if role else "",
        )
        return Engine.start(vllm_python, options, folder, site)

    engines = [
        engine("alone", "0", ""),
        engine("prefill-1", "1", "kv_producer"),
        engine("prefill-2", "0", "kv_producer"),
        engine("decode", "1", "kv_consumer"),
    ]
    try:
        with running(engines):
            alone, *prefill, decode = engines
            urls = [one.url for one in prefill]
            flags = ["--prefill-threshold", "0", "--kv-events-bind", events]
            router = start_router(folder, urls, [decode.url], store.url, flags)
            serving = Cluster(store, router, alone, prefill, decode)
            try:
                yield serving
            finally:
                router.stop()
                serving.store.stop()
    finally:
        store.stop()


def whole_blocks(prompt_tokens: int) -> int:
    """Tokens of a prompt that need not be computed: all full blocks, but never the last token."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def references(cluster: Cluster, asked: list[Question]) -> list[Answer]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda one: reference(cluster.alone.address, one), asked))


def gained(engine: Engine, action: Callable[[], object]) -> dict[str, int]:
    """What an action added to an engine's prompt tokens, by source."""
    before = engine.prompt_tokens()
    action()
    after = engine.prompt_tokens()
    return {key: after[key] - before[key] for key in after}


def test_tokens_are_those_of_one_engine_alone_and_no_block_is_computed_twice(
    cluster: Cluster,
) -> None:
    asked = questions(seed=1, count=COMPLETED)
    leaving = [one for one in questions(seed=2, count=ABORTED) if not one.chat]
    expected = references(cluster, asked)
    before = cluster.decode.prompt_tokens()
    with ThreadPoolExecutor(4) as others:
        left = [others.submit(leave_early, cluster.router.address, one) for one in leaving]
        got = answers(cluster.router.address, asked, AT_ONCE)
        for one in left:
            one.result()
    after = cluster.decode.prompt_tokens()

    wrong = {
        question.name: text
        for question, want, have in zip(asked, expected, got, strict=True)
        if (text := difference(want, have))
    }
    ties = [
        q.name for q, want, have in zip(asked, expected, got, strict=True) if is_tie(want, have)
    ]
    print(f"{len(got)} completed, {len(leaving)} left early, differences behind a tie: {ties}")
    assert not wrong
    assert len(got) >= 64

    computed = after["local_compute"] - before["local_compute"]
    loaded = after["external_kv_transfer"] - before["external_kv_transfer"]
    found = after["local_cache_hit"] - before["local_cache_hit"]
    print(f"decode engine: {loaded} tokens loaded, {found} held, {computed} computed")
    least = sum(one.prompt_tokens - whole_blocks(one.prompt_tokens) for one in got)
    assert least <= computed <= least + BLOCK_TOKENS * len(leaving)
    assert loaded + found >= sum(whole_blocks(one.prompt_tokens) for one in got)
    assert loaded > found


def test_several_prompts_and_samples_are_those_of_one_engine_alone(cluster: Cluster) -> None:
    asked = choices.several()
    with ThreadPoolExecutor(4) as pool:
        alone, routed = (
            list(pool.map(lambda body, to=address: choices.told(to, body), asked))
            for address in (cluster.alone.address, cluster.router.address)
        )
    wrong = []
    for body, (want, usage), (have, summed) in zip(asked, alone, routed, strict=True):
        counts = [
            {key: value for key, value in (one or {}).items() if key.endswith("_tokens")}
            for one in (usage, summed)
        ]
        if where := choices.difference([want, counts[0]], [have, counts[1]]):
            wrong.append((where, body))
    total = sum(choices.tokens(want) for want, _ in alone)
    print(f"{len(asked)} requests for several choices, {total} tokens compared")
    assert not wrong
    assert total > 1000


@pytest.mark.parametrize("size", [5, 32, 33, 65, 1000, 3000])
def test_a_prompt_prefilled_elsewhere_is_loaded_but_for_its_last_tokens(
    cluster: Cluster, size: int
) -> None:
    question = Question(f"size-{size}", token_prompt(random.Random(size), size), max_tokens=4)
    sources = gained(cluster.decode, lambda: answer(cluster.router.address, question))
    assert sources == {
        "external_kv_transfer": whole_blocks(size),
        "local_cache_hit": 0,
        "local_compute": size - whole_blocks(size),
    }


def test_a_prefix_computed_on_one_prefill_engine_is_loaded_by_the_other(cluster: Cluster) -> None:
    draw = random.Random(3)
    prefix = token_prompt(draw, 640)
    one, other = (
        Question(f"prefix-{index}", token_prompt(draw, 900, prefix), max_tokens=4)
        for index in range(2)
    )
    first, second = cluster.prefill
    answer(first.address, one)
    expected = references(cluster, [other])[0]
    sources = gained(second, lambda: answer(second.address, other))
    assert sources == {"external_kv_transfer": 640, "local_cache_hit": 0, "local_compute": 260}
    assert not difference(expected, answer(second.address, other))


def test_overwritten_bytes_are_caught_and_computed_again(cluster: Cluster) -> None:
    question = Question("overwritten", token_prompt(random.Random(4), 500), max_tokens=16)
    expected = references(cluster, [question])[0]
    answer(cluster.prefill[0].address, question)
    overwrite_pool(cluster.store)
    got: list[Answer] = []
    sources = gained(cluster.decode, lambda: got.append(answer(cluster.decode.address, question)))
    assert got[0].tokens == expected.tokens
    cluster.decode.wait_log("blocks in the store's memory are not what they were")
    assert eventually(lambda: cluster.store.stats()["evictions_total.deleted"] > 0)
    print(f"decode engine after the overwriting: {sources}")


def test_with_verification_off_overwritten_bytes_change_the_output(
    cluster: Cluster, vllm_python: Path, site: Path | None, engine_folder: Path
) -> None:
    question = Question("trusting", token_prompt(random.Random(5), 500), max_tokens=16)
    expected = references(cluster, [question])[0]
    transfer = transfer_config(cluster.store.url, "kv_consumer", verify=False)
    options = EngineOptions("trusting", cluster.alone.options.model, "0", transfer)
    trusting = Engine.start(vllm_python, options, engine_folder, site)
    with running([trusting]):
        answer(cluster.prefill[0].address, question)
        overwrite_pool(cluster.store)
        got = answer(trusting.address, question)
        assert got.cached_tokens == whole_blocks(500)
        assert got.tokens != expected.tokens


def overwrite_pool(store: Service) -> None:
    """Fill the store's memory with zeros behind its back."""
    pool = store.memory_file()
    with pool.open("r+b", buffering=0) as file:
        size = file.seek(0, 2)
        file.seek(0)
        zeros = bytes(1 << 20)
        for _ in range(size // len(zeros)):
            file.write(zeros)


def test_a_real_engine_speaks_the_dialect_that_the_simulator_is_held_to(cluster: Cluster) -> None:
    def ask(method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(cluster.alone.address, timeout=60)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    for refusal in openai_cases.refusals(cluster.alone.options.max_tokens):
        openai_cases.check_refusal(ask, "tiny", refusal)
    for accepted in openai_cases.ACCEPTED:
        openai_cases.check_accepted(ask, "tiny", accepted)
    for path in (openai_cases.COMPLETIONS, openai_cases.CHAT):
        openai_cases.check_stream(ask, "tiny", path)
        openai_cases.check_choices(ask, "tiny", path)
    openai_cases.check_usage_only_when_asked(ask, "tiny")
    openai_cases.check_tokenize(ask, "tiny")
    openai_cases.check_endpoints(ask, "tiny")


def test_every_parameter_means_through_the_router_what_it_means_to_one_engine(
    cluster: Cluster,
) -> None:
    asked = matrix.cases()
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(partial(matrix.outcome, cluster.alone.address), asked))
        routed = list(pool.map(partial(matrix.outcome, cluster.router.address), asked))
    wrong = [
        f"{case.name}: {text}"
        for case, want, got in zip(asked, alone, routed, strict=True)
        if (text := matrix.difference(list(want), list(got)))
    ]
    refused = {case.name for case, want in zip(asked, alone, strict=True) if want[0] != 200}
    print(f"{len(asked)} cells compared, {len(refused)} of them refused by both: {refused}")
    assert not wrong, "\n".join(wrong)
    for case in matrix.cases(refused=True):
        assert matrix.outcome(cluster.router.address, case) == (400, case.parameter)


def test_engines_go_on_while_the_store_is_dead_and_use_it_when_it_is_back(
    cluster: Cluster, engine_folder: Path
) -> None:
    asked = questions(seed=6, count=24)
    expected = references(cluster, asked)
    with ThreadPoolExecutor(8) as pool:
        under_way = [
            pool.submit(answer, cluster.router.address, question) for question in asked[:16]
        ]
        under_way[0].result()
        cluster.store.kill()
        got = [one.result() for one in under_way]
        got += answers(cluster.router.address, asked[16:], 8)
    assert [difference(*pair) for pair in zip(expected, got, strict=True)] == [""] * len(asked)

    port = int(cluster.store.address.rpartition(":")[2])
    cluster.store = start_store(engine_folder, port=port, name="store-again")
    again = Question("again", token_prompt(random.Random(7), 650), max_tokens=4)
    for engine in (*cluster.prefill, cluster.decode):
        engine.wait_store_back()
    answer(cluster.prefill[0].address, again)
    cluster.store.wait_stored(whole_blocks(650) // BLOCK_TOKENS)
    sources = gained(cluster.decode, lambda: answer(cluster.decode.address, again))
    assert sources["external_kv_transfer"] == whole_blocks(650)
