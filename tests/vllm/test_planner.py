"""Real vLLM engines behind `--policy planner`, of which each has one long prefill leg at a time."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.vllm.asking import Question, answers, difference, questions, reference, token_prompt
from tests.vllm.engines import Engine, EngineOptions, running, transfer_config
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service, start_router, start_store

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.tested("vllm", "the policy planner", "engines"),
]

POLICIES = ("prefix", "planner")
PROMPTS, TOKENS = 24, 3000


@dataclass
class Cluster:
    """Two engines for each leg, one alone, and a router before them for each policy."""

    routers: dict[str, Service]
    alone: Engine
    prefill: list[Engine]

    def prefill_seconds(self) -> tuple[float, float, int]:
        """Seconds that prefill legs computed and waited on their engines so far; their number."""
        found = [engine.counters() for engine in self.prefill]
        computed = sum(each["vllm:request_prefill_time_seconds_sum"] for each in found)
        waited = sum(each["vllm:request_queue_time_seconds_sum"] for each in found)
        count = sum(each["vllm:request_prefill_time_seconds_count"] for each in found)
        return computed, waited, int(count)


@pytest.fixture(scope="module")
def cluster(vllm_python: Path, site: Path | None, engine_folder: Path) -> Iterator[Cluster]:
    folder, model = engine_folder, model_folder(TINY, vllm_python)
    store = start_store(folder, name="store-planner")
    routers: dict[str, Service] = {}

    def engine(name: str, core: str, role: str) -> Engine:
        transfer = transfer_config(store.url, role, name=name, deadline_s=10.0) if role else None
        options = EngineOptions(f"planner-{name}", model, core, transfer)
        return Engine.start(vllm_python, options, folder, site)

    engines = [engine("alone", "0", "")]
    engines += [engine(f"prefill-{core}", core, "kv_producer") for core in "01"]
    engines += [engine(f"decode-{core}", core, "kv_consumer") for core in "01"]
    try:
        with running(engines):
            prefill, decode = [e.url for e in engines[1:3]], [e.url for e in engines[3:]]
            for policy in POLICIES:
                flags = ["--policy", policy, "--prefill-threshold", "0", "--landing-timeout", "30"]
                routers[policy] = start_router(folder, prefill, decode, store.url, flags)
            yield Cluster(routers, engines[0], engines[1:3])
    finally:
        for router in routers.values():
            router.stop()
        store.stop()


def test_prompts_that_waited_have_the_tokens_of_one_engine_alone(cluster: Cluster) -> None:
    asked = questions(45, 32)
    expected = [reference(cluster.alone.address, question) for question in asked]
    got = answers(cluster.routers["planner"].address, asked, 12)
    assert [difference(*pair) for pair in zip(expected, got, strict=True)] == [""] * len(got)


def test_no_long_leg_waits_on_an_engine_and_what_that_costs(cluster: Cluster) -> None:
    """Prints the time between two legs of an engine: no leg waits there that could begin."""
    waits: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for number, policy in enumerate((*POLICIES, *reversed(POLICIES)), 100):
        draw = random.Random(number)
        asked = [
            Question(f"{policy} {at}", token_prompt(draw, TOKENS), max_tokens=1)
            for at in range(PROMPTS)
        ]
        before, since_s = cluster.prefill_seconds(), time.monotonic()
        answers(cluster.routers[policy].address, asked, PROMPTS)
        took_s, after = time.monotonic() - since_s, cluster.prefill_seconds()
        computed_s, waited_s, legs = (b - a for a, b in zip(before, after, strict=True))
        assert legs == PROMPTS
        waits[policy].append(waited_s / legs)
        print(
            f"{policy}: {PROMPTS} prompts of {TOKENS} tokens at once in {took_s:.2f} s; a leg "
            f"computed {1000 * computed_s / legs:.0f} ms and waited {1000 * waited_s / legs:.0f} "
            f"ms on its engine, which had none for {1000 * (2 * took_s - computed_s) / legs:.0f}"
        )
    assert max(waits["planner"]) < min(waits["prefix"])
