"""Real SGLang engines, prefill and decode apart: KV goes by Mooncake over TCP."""

import http.client
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fakes.patience import eventually
from tests.sglang.engines import (
    PATIENCE_S,
    StartEngine,
    metric,
    requests_of,
    until_idle,
)
from tests.vllm.asking import (
    Answer,
    Question,
    answer,
    answers,
    difference,
    questions,
    reference,
    token_prompt,
)
from tests.vllm.engines import Engine, ask, free_port, running
from tests.vllm.services import Service, start_router

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.tested("sglang", "KV from engine to engine", "engines"),
]

HOW = "set KVROUTER_MOONCAKE as .ci/stages/sglang-engines.sh does"
ASKED = [one for one in questions(seed=5, count=42) if not one.chat]


@dataclass(frozen=True)
class Cluster:
    """A prefill and a decode engine behind a router, and what one engine alone answers."""

    router: Service
    prefill: Engine
    decode: Engine
    alone: list[Answer]


def over_tcp() -> dict[str, str]:
    """How an engine finds Mooncake, and uses it on the loopback; the test is skipped without it."""
    folder = os.environ.get("KVROUTER_MOONCAKE")
    if not folder:
        pytest.skip(f"no Mooncake: {HOW}")
    return {
        "PYTHONPATH": folder,
        "LD_LIBRARY_PATH": f"{folder}/lib",
        "MC_FORCE_TCP": "1",
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "MOONCAKE_PROTOCOL": "tcp",
        "SGLANG_HOST_IP": "127.0.0.1",
    }


@pytest.fixture(scope="module")
def cluster(start_engine: StartEngine, engine_folder: Path) -> Iterator[Cluster]:
    environment = over_tcp()
    alone = start_engine("alone")
    with running([alone]):
        expected = [reference(alone.address, one) for one in ASKED]
    apart = ("--disaggregation-transfer-backend", "mooncake", "--disaggregation-mode")
    port = ("--disaggregation-bootstrap-port", str(free_port()))
    backup = ("--disaggregation-decode-retraction-backup", "none")  # its host pool needs CUDA
    prefill = start_engine("prefill", environment, flags=[*apart, "prefill", *port])
    decode = start_engine("decode", environment, flags=[*apart, "decode", *port, *backup])
    with running([prefill, decode]):
        router = start_router(engine_folder, [prefill.url], [decode.url], None)
        try:
            for engine in (prefill, decode):
                router.wait_log(f"engine {engine.address} joins")
            yield Cluster(router, prefill, decode, expected)
        finally:
            router.stop()


def test_tokens_are_those_of_one_engine_alone_with_both_legs(cluster: Cluster) -> None:
    plans = 'kvrouter:plans_total{why="prefill"}'
    before = metric(cluster.router, plans)
    got = answers(cluster.router.address, ASKED, 4)
    wrong = [difference(*pair) for pair in zip(cluster.alone, got, strict=True)]
    assert wrong == [""] * len(ASKED)
    assert [len(one.tokens) for one in got] == [one.max_tokens for one in ASKED]
    assert metric(cluster.router, plans) == before + len(ASKED)
    assert until_idle(cluster.prefill, cluster.decode)


def test_an_engine_refuses_what_has_no_room(cluster: Cluster) -> None:
    body = Question("without a room", [5, 6, 7], max_tokens=2).body()
    for engine in (cluster.prefill, cluster.decode):
        status, said = ask(engine.address, "POST", "/v1/completions", body, PATIENCE_S)
        assert (status, b"bootstrap room" in said) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_both_legs(stream: bool, cluster: Cluster) -> None:
    body = Question("left", token_prompt(random.Random(6), 500), stream=stream, max_tokens=3000)
    connection = http.client.HTTPConnection(cluster.router.address, timeout=PATIENCE_S)
    connection.request("POST", body.path, json.dumps(body.body()))
    assert eventually(lambda: requests_of(cluster.decode) == 1)
    connection.close()
    assert until_idle(cluster.prefill, cluster.decode)
    again = answer(cluster.router.address, ASKED[0])
    assert not difference(cluster.alone[0], again)
