"""The engine as a process: OpenAI's API, and its place behind the router."""

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.asking import Question, answer, answers, leave_early, token_prompt
from tests.vllm.engines import ask, free_port
from tests.vllm.services import Service, start_router, start_store

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
CHUNK = 64
SIZES = (
    *("--block-tokens", "16", "--chunk-tokens", str(CHUNK), "--max-model-len", "2048"),
    *("--deadline-s", "20"),
)
ASK_S = 60.0
START_S = 180.0  # torch and transformers take long to import where no file is cached


@dataclass
class Cluster:
    store: Service
    router: Service
    alone: Service
    prefill: Service
    decode: Service


StartEngine = Callable[..., Service]


@pytest.fixture(scope="module")
def start_engine(
    engine_command: list[str], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartEngine]:
    """Starts engines, ended with the module."""
    folder, started = tmp_path_factory.mktemp("engines"), list[Service]()

    def start(name: str, *flags: str) -> Service:
        port = free_port()
        served = ("--served-model-name", "tiny", "--name", name, "--threads", "1")
        command = [*engine_command, "--model", model, "--port", port, *served, *SIZES, *flags]
        engine = Service.start(name, command, folder)
        engine.address, engine.url = f"127.0.0.1:{port}", f"http://127.0.0.1:{port}"
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.stop()


@pytest.fixture(scope="module")
def cluster(
    start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("services")
    store = start_store(folder)
    shares = ("--store", store.url)
    engines = [
        start_engine("alone"),
        start_engine("prefill", *shares, "--role", "prefill"),
        start_engine("decode", *shares, "--role", "decode", "--cache", "paged"),
    ]
    try:
        alone, prefill, decode = [
            each.wait_http(each.address, "/health", START_S) for each in engines
        ]
        flags = ["--prefill-threshold", "0"]
        router = start_router(folder, [prefill.url], [decode.url], store.url, flags)
        try:
            yield Cluster(store, router, alone, prefill, decode)
        finally:
            router.stop()
    finally:
        store.stop()


def metric(service: Service, name: str, label: str = "") -> float:
    lines = ask(service.address, "GET", "/metrics", None, ASK_S)[1].decode().splitlines()
    return sum(float(each.split()[-1]) for each in lines if each.startswith(name) and label in each)


def post(service: Service, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
    status, data = ask(service.address, "POST", path, {"model": "tiny", **body}, ASK_S)
    return status, json.loads(data)


def mix(seed: int, count: int = 12) -> list[Question]:
    """Token ids and text, streamed or not, some with a prefix in common."""
    draw = random.Random(seed)
    shared = token_prompt(draw, 300)
    sizes = [5, 64, 65, 200, 333, 500]
    prompts: list[list[int] | str] = [
        token_prompt(draw, sizes[number % 6], shared[: number * 40]) for number in range(count)
    ]
    prompts[1] = "def f(x): return x " * 20
    return [
        Question(f"q{number}", prompt, stream=number % 2 == 0, max_tokens=8)
        for number, prompt in enumerate(prompts)
    ]


def test_behind_the_router_tokens_are_those_of_one_engine_alone(cluster: Cluster) -> None:
    asked = mix(seed=1)
    expected = [answer(cluster.alone.address, each) for each in asked]
    with ThreadPoolExecutor(2) as leaving:
        for each in mix(seed=2, count=2):
            leaving.submit(leave_early, cluster.router.address, each)
        got = answers(cluster.router.address, asked, 4)
    assert [each.tokens for each in got] == [each.tokens for each in expected]
    assert [each.prompt_tokens for each in got] == [each.prompt_tokens for each in expected]


def test_the_decode_engine_loads_what_the_prefill_engine_computed(cluster: Cluster) -> None:
    prompt = token_prompt(random.Random(3), 400)
    landed = metric(cluster.router, "kvrouter:landings_total", 'outcome="landed"')
    question = Question("landing", prompt, max_tokens=4)
    loaded = metric(cluster.decode, "vllm:prompt_tokens", "external_kv_transfer")
    got = answer(cluster.router.address, question)
    gained = metric(cluster.decode, "vllm:prompt_tokens", "external_kv_transfer") - loaded
    assert gained == 6 * CHUNK
    assert metric(cluster.router, "kvrouter:landings_total", 'outcome="landed"') == landed + 1
    assert metric(cluster.router, "kvrouter:upstream_errors_total") == 0
    assert got.tokens == answer(cluster.alone.address, question).tokens


def test_the_store_lists_the_engines_under_one_manifest(cluster: Cluster) -> None:
    stats = cluster.store.stats()
    assert stats["manifests"] == 1


def test_a_stream_has_the_text_of_the_whole_answer(cluster: Cluster) -> None:
    body: dict[str, Any] = {"prompt": "while True:", "max_tokens": 24, "temperature": 0}
    body["ignore_eos"] = True
    whole = post(cluster.alone, **body)[1]["choices"][0]["text"]
    status, data = ask(
        *(cluster.alone.address, "POST", "/v1/completions"),
        {"model": "tiny", **body, "stream": True},
        ASK_S,
    )
    events = [line[6:] for line in data.decode().split("\n\n") if line]
    texts = [json.loads(each)["choices"][0]["text"] for each in events[:-1]]
    assert status == 200
    assert events[-1] == "[DONE]"
    assert "".join(texts) == whole != ""


def test_models_version_and_tokens_of_a_text(cluster: Cluster) -> None:
    (card,) = json.loads(ask(cluster.alone.address, "GET", "/v1/models", None, ASK_S)[1])["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 2048)
    assert b"transformers 5" in ask(cluster.alone.address, "GET", "/version", None, ASK_S)[1]
    tokens = post(cluster.alone, "/tokenize", prompt="class A:")[1]["tokens"]
    body: dict[str, Any] = {"prompt": "class A:", "max_tokens": 1, "return_token_ids": True}
    assert post(cluster.alone, **body)[1]["choices"][0]["prompt_token_ids"] == tokens


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": ""}, 400),
        ({"prompt": "a", "n": 2}, 400),
        ({"prompt": [1], "max_tokens": 4096}, 400),
        ({"prompt": [1 << 40]}, 400),
        ({"prompt": "a", "model": "other"}, 404),
    ],
)
def test_a_bad_request_is_refused_as_openai_does(
    cluster: Cluster, body: dict[str, Any], status: int
) -> None:
    got, refusal = post(cluster.alone, **body)
    assert got == status
    assert refusal["error"]["message"]
    assert refusal["error"]["code"] == status


def test_a_client_that_leaves_frees_the_engine(cluster: Cluster) -> None:
    question = Question("leaves", token_prompt(random.Random(4), 50))
    for _ in range(3):
        leave_early(cluster.alone.address, question)
    assert answer(cluster.alone.address, replace(question, max_tokens=2)).tokens
    assert metric(cluster.alone, "vllm:num_requests_running") == 0


def test_a_model_that_is_not_there_is_named(start_engine: StartEngine) -> None:
    engine = start_engine("none", "--model", "no/such/folder")
    assert engine.process.wait(START_S) == 1
    assert "no/such/folder cannot be served" in engine.tail()


def test_flags_that_do_not_fit_together_are_named(start_engine: StartEngine) -> None:
    engine = start_engine("odd", "--chunk-tokens", "65")
    assert engine.process.wait(START_S) == 2
    assert "--chunk-tokens must be a multiple of --block-tokens" in engine.tail()


def test_the_answers_go_on_when_the_store_is_killed(cluster: Cluster) -> None:
    """The last test of the module: it takes the store away."""
    asked = mix(seed=5, count=6)
    expected = [answer(cluster.alone.address, each).tokens for each in asked]
    assert [answer(cluster.router.address, each).tokens for each in asked] == expected
    cluster.store.kill()
    got = answers(cluster.router.address, asked, 2)
    assert [each.tokens for each in got] == expected
