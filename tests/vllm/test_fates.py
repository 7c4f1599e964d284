"""What the router says became of prompt tokens, beside real vLLM engines' own counters."""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    pytest.mark.tested("vllm", "KV events", "engines"),  # by which it splits whole prompts
    pytest.mark.tested("vllm", "fates of prompt tokens", "engines"),
]

KV_BYTES, STORE = "16M", "56MiB"  # 8,192 tokens of an engine; 28,672 of the store
PROMPTS, ROUNDS = 40, 4
TOKENS, NEW_TOKENS = (300, 1600), 40
MOST_WRONG, MOST_UNKNOWN = 0.005, 0.01  # of all prompt tokens


@dataclass
class Cluster:
    """A router before engines that share a store; those of `computing` compute prompts."""

    router: Service
    computing: list[Engine]

    def counted(self) -> Counter[str]:
        """Prompt tokens by vLLM's own counters."""
        return sum((Counter(engine.prompt_tokens()) for engine in self.computing), Counter[str]())

    def fates(self) -> Counter[str]:
        """Prompt tokens by the router's counters."""
        page = ask(self.router.address, "GET", "/metrics", None, 10.0)[1].decode()
        row = r'^kvrouter:prompt_tokens_by_fate_total\{fate="(\w+)",model="tiny"\} (\S+)$'
        return Counter({fate: int(float(n)) for fate, n in re.findall(row, page, re.M)})


@contextmanager
def cluster(
    python: Path, site: Path | None, folder: Path, roles: Sequence[str]
) -> Iterator[Cluster]:
    """An engine of each role, on a core of its own."""
    model, events = model_folder(TINY, python), f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as cleanup:
        store = start_store(folder, STORE, name="store-fates")
        cleanup.callback(store.stop)
        engines = []
        for core, role in enumerate(roles):
            name = f"fates-{role}-{core}"
            transfer = transfer_config(store.url, role, name=name, deadline_s=10.0)
            options = EngineOptions(
                name, model, str(core), transfer, kv_bytes=KV_BYTES, events=events
            )
            engines.append(Engine.start(python, options, folder, site))
        cleanup.enter_context(running(engines))
        legs: dict[str, list[Engine]] = {role: [] for role in ("kv_producer", "kv_consumer")}
        for engine, role in zip(engines, roles, strict=True):
            legs[role if role in legs else "kv_consumer"].append(engine)
        prefill, decode = ([engine.url for engine in each] for each in legs.values())
        flags = ["--kv-events-bind", events, "--prefill-threshold", "0"]
        router = start_router(folder, prefill, decode, store.url, flags)
        cleanup.callback(router.stop)
        yield Cluster(router, legs["kv_producer"] or engines)


@pytest.mark.parametrize(
    ("roles", "at_once"),
    [(("kv_both", "kv_both"), 1), (("kv_producer", "kv_consumer"), 4)],
    ids=["whole", "prefill and decode"],
)
def test_fates_are_what_vllm_counts_by_source(
    vllm_python: Path,
    site: Path | None,
    engine_folder: Path,
    roles: Sequence[str],
    at_once: int,
) -> None:
    """Beginnings come again soon, later, or when the store has evicted them; ends are new.

    Engines that answer whole prompts do not say what was in their own caches. They are asked one
    at a time: what others evict between plan and step, the router cannot know.
    """
    draw = random.Random(47)
    begun = [token_prompt(draw, draw.randint(*TOKENS)) for _ in range(PROMPTS)]
    order = [prompt for _ in range(ROUNDS) for prompt in draw.sample(begun, PROMPTS)]
    order = [prompt for each in order for prompt in [each] * draw.choice((1, 1, 2))]
    asked = [[*prompt, *token_prompt(draw, NEW_TOKENS)] for prompt in order]
    questions = [Question(f"{at}", prompt, max_tokens=2) for at, prompt in enumerate(asked)]
    total = sum(map(len, asked))
    with cluster(vllm_python, site, engine_folder, roles) as here:
        before = here.counted()
        for first in range(0, len(questions), at_once):
            answers(here.router.address, questions[first : first + at_once], at_once)
            here.fates()  # meanwhile its events arrive
        fates, counted = here.fates(), here.counted() - before
    print(f"{len(asked)} prompts: vLLM {dict(counted)}; the router {dict(fates)}")
    assert sum(fates.values()) == sum(counted.values()) == total
    assert fates[Fate.LOWER] == 0  # they load from the store's own memory
    for source, fate in (("local_cache_hit", Fate.ENGINE), ("external_kv_transfer", Fate.STORE)):
        assert counted[source] > 0.05 * total, source
        assert abs(counted[source] - fates[fate]) <= MOST_WRONG * total, source
    assert fates[Fate.EVICTED_STORE] > 0
    assert fates[Fate.UNKNOWN] <= MOST_UNKNOWN * total
