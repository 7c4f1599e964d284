"""Real engines of two hosts, each with a store node of its own: one reads what the other put."""

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.fakes.patience import eventually
from tests.vllm.asking import Answer, Question, difference, reference, token_prompt
from tests.vllm.engines import BLOCK_TOKENS, Engine, EngineOptions, running, transfer_config
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service, start_store

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.vllm_tier.announced import fetch_hint
from kvrouter_store.identity.chain import hash_tokens

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.tested("vllm", "KV hints", "engines"),
]

PATIENCE_S = 60.0
DEADLINE_S = 10.0  # of the connector: a crowded machine is no store that is away


@dataclass
class Hosts:
    """A prefill engine with the node `far`, and a decode engine with the node `near`."""

    far: Service
    near: Service
    prefill: Engine
    decode: Engine


@pytest.fixture(scope="module", params=["auto", "tcp"])
def hosts(
    request: pytest.FixtureRequest, vllm_python: Path, site: Path | None, engine_folder: Path
) -> Iterator[Hosts]:
    """The decode engine loads from its node's memory (auto), or by way of vLLM's (tcp)."""
    transport, model = request.param, model_folder(TINY, vllm_python)
    stores = [start_store(engine_folder, name=name) for name in ("far", "near")]

    def engine(name: str, core: str, store: Service, **more: Any) -> Engine:
        transfer = transfer_config(store.url, name=name, deadline_s=DEADLINE_S, **more)
        options = EngineOptions(f"neighbours-{transport}-{name}", model, core, transfer)
        return Engine.start(vllm_python, options, engine_folder, site)

    try:
        far, near = stores
        engines = prefill, decode = (
            engine("prefill", "0", far),
            engine("decode", "1", near, neighbours=far.address, transport=transport),
        )
        with running(engines):
            yield Hosts(far, near, prefill, decode)
    finally:
        for store in stores:
            store.stop()


def told(
    engine: Engine, question: Question, hint: dict[str, Any] | None = None, **store: Any
) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a leg as a router sends it, and the connector's report."""
    about = {"kvstore": store} if store else {}
    about |= {"kv_hint": hint} if hint else {}
    params = {"kv_transfer_params": about} if about else {}
    answer = engine.complete(**{**question.body(), **params})
    return answer["choices"][0]["token_ids"], answer["kv_transfer_params"]["kvstore"]


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS


def asked(hosts: Hosts, size: int) -> tuple[Question, Answer]:
    """A question, and the answer of an engine that can read nothing for it: a salt names blocks."""
    question = Question(f"size-{size}", token_prompt(random.Random(size), size))
    return question, reference(hosts.prefill.address, replace(question, salt="alone"))


def held(node: Service, question: Question, report: dict[str, Any]) -> int:
    """Leading blocks of the question that a node has."""
    root = bytes.fromhex(report["root"])
    tokens = array("I", cast("list[int]", question.prompt))
    hashes = hash_tokens(tokens, BLOCK_TOKENS, root=root).data
    with StoreClient(node.url) as client:
        named = [each for each in client.manifests() if each.digest.hex() == report["manifest"]]
        return client.match(named[0].manifest, hashes).blocks if named else 0


def loaded(hosts: Hosts) -> int:
    """Blocks that the decode engine got from a store so far."""
    return whole_blocks(hosts.decode.prompt_tokens()["external_kv_transfer"])


@pytest.mark.parametrize("size", [33, 500, 2000])
def test_decode_waits_for_what_lands_at_another_node_and_keeps_it_in_its_own(
    hosts: Hosts, size: int
) -> None:
    question, expected = asked(hosts, size)
    _, report = told(hosts.prefill, replace(question, max_tokens=1))
    assert report["node"] == hosts.far.url
    before = loaded(hosts)
    coming = {"coming_blocks": report["blocks"], "wait_s": PATIENCE_S, "source": report["node"]}
    tokens, own = told(hosts.decode, question, **coming)
    assert not difference(expected, Answer(tokens, 0, 0))
    assert loaded(hosts) - before == whole_blocks(size)
    assert own["node"] == hosts.near.url
    assert own["blocks"] >= whole_blocks(size)
    assert eventually(lambda: held(hosts.near, question, own) == whole_blocks(size))


def test_decode_reads_what_is_at_another_node_now(hosts: Hosts) -> None:
    question, expected = asked(hosts, 650)
    _, report = told(hosts.prefill, replace(question, max_tokens=1))
    assert eventually(lambda: held(hosts.far, question, report) == whole_blocks(650))
    before = loaded(hosts)
    tokens, _ = told(hosts.decode, question, source=hosts.far.url)
    assert not difference(expected, Answer(tokens, 0, 0))
    assert loaded(hosts) - before == whole_blocks(650)


@pytest.mark.parametrize(("size", "allowed"), [(660, True), (740, False)])
def test_decode_obeys_the_hint_of_another_router_and_answers_what_came_of_it(
    hosts: Hosts, size: int, allowed: bool
) -> None:
    question, expected = asked(hosts, size)
    _, report = told(hosts.prefill, replace(question, max_tokens=1))
    blocks = whole_blocks(size)
    assert eventually(lambda: held(hosts.far, question, report) == blocks)
    before = loaded(hosts)
    hint = fetch_hint("m", f"tcp://{hosts.far.address if allowed else '127.0.0.1:9'}", [1, 2])
    tokens, own = told(hosts.decode, question, hint)
    assert not difference(expected, Answer(tokens, 0, 0))
    came = blocks if allowed else 0
    assert own["fetch"] == {"requested": 2, "accepted": came, "honoured": came}
    assert loaded(hosts) - before == came


def test_a_node_that_died_costs_a_computation(hosts: Hosts) -> None:
    question, expected = asked(hosts, 700)
    _, report = told(hosts.prefill, replace(question, max_tokens=1))
    assert eventually(lambda: held(hosts.far, question, report) == whole_blocks(700))
    hosts.far.kill()
    before = loaded(hosts)
    tokens, _ = told(hosts.decode, question, source=hosts.far.url)
    assert not difference(expected, Answer(tokens, 0, 0))
    assert loaded(hosts) == before
