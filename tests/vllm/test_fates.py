"""What the router says became of prompt tokens, beside real vLLM engines' own counters."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.vllm.asking import Question, answers, token_prompt
from tests.vllm.engines import Engine, EngineOptions, ask, free_port, running, transfer_config
from tests.vllm.models import TINY, model_folder
from tests.vllm.services import Service, start_router, start_store

from kvrouter.fates.fate import Fate

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.tested("vllm", "fates of prompt tokens", "engines"),
]

KV_BYTES, STORE = "16M", "56MiB"  # 8,192 tokens of an engine; 28,672 of the store
PROMPTS, ROUNDS = 40, 4
TOKENS = (300, 1600)
MOST_WRONG, MOST_UNKNOWN = 0.005, 0.01  # of all prompt tokens


@dataclass
class Cluster:
    """Two engines that share a store."""

    router: Service
    engines: list[Engine]

    def counted(self) -> Counter[str]:
        """Prompt tokens by vLLM's own counters."""
        return sum((Counter(engine.prompt_tokens()) for engine in self.engines), Counter[str]())

    def fates(self) -> Counter[str]:
        """Prompt tokens by the router's counters."""
        page = ask(self.router.address, "GET", "/metrics", None, 10.0)[1].decode()
        row = r'^kvrouter:prompt_tokens_by_fate_total\{fate="(\w+)",model="tiny"\} (\S+)$'
        return Counter({fate: int(float(n)) for fate, n in re.findall(row, page, re.M)})


@pytest.fixture(scope="module")
def cluster(vllm_python: Path, site: Path | None, engine_folder: Path) -> Iterator[Cluster]:
    folder, model = engine_folder, model_folder(TINY, vllm_python)
    events = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as cleanup:
        store = start_store(folder, STORE, name="store-fates")
        cleanup.callback(store.stop)
        engines = []
        for core in "01":
            transfer = transfer_config(store.url, name=f"fates-{core}", deadline_s=10.0)
            options = EngineOptions(
                f"fates-{core}", model, core, transfer, kv_bytes=KV_BYTES, events=events
            )
            engines.append(Engine.start(vllm_python, options, folder, site))
        cleanup.enter_context(running(engines))
        flags = ["--kv-events-bind", events]
        router = start_router(folder, [], [engine.url for engine in engines], store.url, flags)
        cleanup.callback(router.stop)
        yield Cluster(router, engines)


def test_fates_are_what_vllm_counts_by_source(cluster: Cluster) -> None:
    """Prompts come again soon, later, or when the store has evicted them.

    One at a time: what others evict between plan and step, the router cannot know.
    """
    draw, before = random.Random(47), cluster.counted()
    prompts = [token_prompt(draw, draw.randint(*TOKENS)) for _ in range(PROMPTS)]
    asked = [prompt for _ in range(ROUNDS) for prompt in draw.sample(prompts, PROMPTS)]
    asked = [prompt for each in asked for prompt in [each] * draw.choice((1, 1, 2))]
    got = answers(
        cluster.router.address,
        [Question(f"{at}", prompt, max_tokens=2) for at, prompt in enumerate(asked)],
        1,
    )
    fates, counted = cluster.fates(), cluster.counted() - before
    total = sum(map(len, asked))
    print(f"{len(got)} prompts: vLLM {dict(counted)}; the router {dict(fates)}")
    assert sum(fates.values()) == sum(counted.values()) == total
    mine = {
        "local_cache_hit": fates[Fate.ENGINE],
        "external_kv_transfer": fates[Fate.STORE],
    }
    assert fates[Fate.LOWER] == 0  # they load from the store's own memory
    for source, tokens in mine.items():
        assert counted[source] > 0.05 * total, source
        assert abs(counted[source] - tokens) <= MOST_WRONG * total, source
    assert fates[Fate.EVICTED_STORE] > 0
    assert fates[Fate.UNKNOWN] <= MOST_UNKNOWN * total
