"""Two real vLLM engines, each on a server of LMCache; the servers share one node, and nothing else.

Engine A computes; engine B takes A's KV from the node. The tokens must be those of a recomputation
under another cache_salt.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.fakes.patience import eventually
from tests.lmcache.server import CHUNK_TOKENS, Server, start_engine, start_server
from tests.lmcache.spoil import spoil
from tests.vllm.asking import Answer, Question, token_prompt
from tests.vllm.engines import running
from tests.vllm.services import Service, start_store

STORED_S = 30.0
LENGTHS = (100, 333, 1000, 2000)
pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.timeout(900),
    pytest.mark.tested("lmcache", "a node of the store below it", "engines"),
]


@dataclass
class Fleet:
    """All of them. `stored`: how many objects server A has had to store so far."""

    store: Service
    a: Server
    b: Server
    cleanup: ExitStack
    stored: int = 0

    def compute(self, question: Question) -> Answer:
        """The answer of engine A, once the node has all whole chunks of the prompt."""
        found = self.a.ask(question)
        self.stored += len(question.prompt) // CHUNK_TOKENS
        assert eventually(lambda: self.a.status()["objects_stored"] >= self.stored, STORED_S)
        return found

    def alone(self, question: Question) -> Answer:
        """The answer where nothing that was computed before can be used."""
        return self.compute(replace(question, salt=f"alone {question.name}"))

    def restart_store(self) -> None:
        """An empty node in the place of the one that was killed."""
        port = int(self.store.address.rpartition(":")[2])
        self.store = start_store(self.store.log.parent, port=port, name="store-again")
        self.cleanup.callback(self.store.stop)


@pytest.fixture(scope="module")
def fleet(
    lmcache_python: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("lmcache-engines")
    given = lmcache_python, environment
    with ExitStack() as cleanup:
        store = start_store(folder)
        cleanup.callback(store.stop)
        servers = []
        for name in "ab":
            servers.append(start_server(name, *given, store.url, folder))
            cleanup.callback(servers[-1].service.stop)
        for server in servers:
            server.service.wait_http(server.service.http, "/healthcheck")
        engines = [
            start_engine(server, str(core), *given, folder) for core, server in enumerate(servers)
        ]
        with running(engines):
            yield Fleet(store, servers[0], servers[1], cleanup)


def test_an_engine_takes_what_another_computed_from_the_store_and_says_the_same(
    fleet: Fleet,
) -> None:
    draw = random.Random(41)
    taken = 0
    for length in LENGTHS:
        question = Question(f"{length}", token_prompt(draw, length))
        fleet.compute(question)
        handed = fleet.b.ask(question)
        assert handed.cached_tokens == length // CHUNK_TOKENS * CHUNK_TOKENS
        assert handed.tokens == fleet.alone(question).tokens
        taken += handed.cached_tokens
    assert fleet.b.engine is not None
    sources = fleet.b.engine.prompt_tokens()
    assert sources["external_kv_transfer"] == taken == 3328
    assert sum(sources.values()) == sum(LENGTHS) == 3433
    status = fleet.b.status()
    assert (status["objects_loaded"], status["objects_not_loaded"]) == (52, 0)
    print(f"engine B: {sources}; adapter B: {status}")


def test_another_salt_finds_nothing(fleet: Fleet) -> None:
    question = Question("salted", token_prompt(random.Random(42), 470), salt="alice")
    fleet.compute(question)
    assert fleet.b.ask(replace(question, salt="bob")).cached_tokens == 0
    assert fleet.b.ask(question).cached_tokens == 448


def test_locks_end_when_the_objects_are_loaded(fleet: Fleet) -> None:
    question = Question("locked", token_prompt(random.Random(43), 660))
    fleet.compute(question)
    assert fleet.b.ask(question).cached_tokens == 640
    assert eventually(lambda: fleet.store.stats()["leases"] == 0)
    assert fleet.b.status()["locks_expired"] == 0


def test_corrupt_objects_are_computed_again(fleet: Fleet) -> None:
    question = Question("spoilt", token_prompt(random.Random(44), 800))
    fleet.compute(question)
    spoil(fleet.store)
    handed = fleet.b.ask(question)
    assert handed.cached_tokens == 0
    assert fleet.b.status()["objects_corrupt"] > 0
    assert handed.tokens == fleet.alone(question).tokens


def test_engines_go_on_without_the_store_and_share_again_when_it_is_back(fleet: Fleet) -> None:
    unshared, shared = (
        Question(f"outage {seed}", token_prompt(random.Random(seed), 400)) for seed in (45, 46)
    )
    reference = fleet.alone(unshared)
    fleet.store.kill()
    assert fleet.b.ask(unshared).tokens == reference.tokens
    assert eventually(lambda: fleet.b.status()["store"] == "away")
    fleet.restart_store()
    assert eventually(lambda: fleet.a.status()["store"] == fleet.b.status()["store"] == "there")
    fleet.compute(shared)
    assert fleet.b.ask(shared).cached_tokens == 384
