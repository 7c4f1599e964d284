"""Models with every kind of cache group, on real engines: prefill, store, decode, router."""

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.link import Link
from tests.vllm.asking import (
    Question,
    answer,
    answers,
    difference,
    leave_early,
    reference,
    token_prompt,
)
from tests.vllm.compatibility import ENGINES, GPU, note
from tests.vllm.engines import ON_GPU, Engine, EngineOptions, ask, running, transfer_config
from tests.vllm.models import (
    DEEPSEEK,
    GEMMA,
    GPT_OSS,
    NEMOTRON,
    QWEN_NEXT,
    TINY,
    WINDOW,
    Recipe,
    model_folder,
)
from tests.vllm.services import Service, start_router, start_store
from tests.vllm.test_engines import overwrite_pool

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.tested("vllm", "kinds of cache groups", "engines"),
]

SERIES = "0.32"  # of make_env.sh
# Neither they nor what is generated after them ends a block. The last leaves over more than half of
# a block of 256.
SIZES = (517, 1483)


@dataclass(frozen=True)
class Kind:
    """A model, how it is started, and how many trailing blocks each of its groups needs."""

    recipe: Recipe
    reaches: tuple[int | None, ...]
    flags: tuple[str, ...] = ()
    block_tokens: int = 32


KINDS = {
    "full attention": Kind(TINY, (None,)),
    "full attention, fp8 KV": Kind(TINY, (None,), ("--kv-cache-dtype", "fp8")),
    "sliding window": Kind(WINDOW, (4,)),
    "full, sliding window": Kind(GEMMA, (None, 4, 4)),
    "full, sliding window, sinks, experts": Kind(GPT_OSS, (None, 4)),
    "full, linear attention": Kind(
        QWEN_NEXT, (None, 1, 1, 1), ("--dtype", "bfloat16"), block_tokens=0
    ),
    # vLLM's CPU scan returns no states within a step: each has to end a block (mamba_mixer2.py).
    "full, Mamba-2": Kind(
        NEMOTRON, (None, 1, 1), ("--max-num-batched-tokens", "128"), block_tokens=0
    ),
    "MLA": Kind(DEEPSEEK, (None,), ("--dtype", "bfloat16")),
}
PROCESSOR = Path("/proc/cpuinfo").read_text()
TRIES_MLA = "KVROUTER_TEST_MLA" in os.environ


class Site:
    """Starts engines of one model before one store."""

    def __init__(self, python: Path, site: Path | None, folder: Path, store: Service) -> None:
        self._python = python
        self._site = site
        self._folder = folder
        self.store = store

    def start(self, kind: Kind, name: str, core: str, **extra: Any) -> Engine:
        options = EngineOptions(
            name,
            model_folder(kind.recipe, self._python),
            core,
            transfer_config(extra.pop("url", self.store.url), name=name, save="prompt", **extra),
            kind.flags,
            block_tokens=kind.block_tokens,
            environment={"VLLM_SERVER_DEV_MODE": "1"},
        )
        return Engine.start(self._python, options, self._folder, self._site)

    @contextmanager
    def routed(self, prefill: Engine, decode: Engine) -> Iterator[Service]:
        flags = ["--prefill-threshold", "0", "--landing-timeout", "10"]
        router = start_router(self._folder, [prefill.url], [decode.url], self.store.url, flags)
        try:
            for engine, role in ((prefill, "prefill"), (decode, "decode")):
                router.wait_log(f"engine {engine.address} joins as {role}")
            yield router
        finally:
            router.stop()


@pytest.fixture
def here(vllm_python: Path, site: Path | None, engine_folder: Path) -> Iterator[Site]:
    store = start_store(engine_folder, name="store-of-groups")
    found = Site(vllm_python, site, engine_folder, store)
    yield found
    found.store.stop()  # a test may have started another


def reported(engine: Engine) -> dict[str, Any]:
    """What an engine says of itself with any answer."""
    answered = engine.complete(prompt=[5], max_tokens=1)
    found: dict[str, Any] = answered["kv_transfer_params"]["kvstore"]
    return found


def landings(router: Service) -> dict[str, int]:
    """How landings ended, by the router's own count."""
    text = ask(router.address, "GET", "/metrics", None, 10.0)[1].decode()
    assert "kvrouter:handoff_missing_total{" not in text
    found = re.findall(r'^kvrouter:landings_total\{outcome="(\w+)"\} (\d+)', text, re.M)
    return {outcome: int(count) for outcome, count in found if int(count)}


def lacks(name: str) -> str:
    """What vLLM needs of a processor for these groups, and this one does not have."""
    if name == "MLA" and not ON_GPU and not ("amx_bf16" in PROCESSOR and TRIES_MLA):
        return "AMX"  # without it, vLLM switches prefix caching off (cpu.py); with it, not yet run
    if "fp8" in name and not ON_GPU and "avx512f" not in PROCESSOR:
        return "AVX-512"
    return ""


@pytest.mark.parametrize("name", KINDS)
def test_decode_loads_what_prefill_computed_once_it_has_landed(here: Site, name: str) -> None:
    if missing := lacks(name):
        note(name, SERIES, ENGINES, f"needs {missing}")
        pytest.skip(f"{name}: run on a processor with {missing}, MLA with KVROUTER_TEST_MLA=1")
    kind = KINDS[name]
    prefill, decode = here.start(kind, "prefill", "0"), here.start(kind, "decode", "1")
    with running([prefill, decode]), here.routed(prefill, decode) as router:
        said = reported(prefill)
        groups = said.get("groups", [{"manifest": said["manifest"], "reach": None}])
        assert tuple(group["reach"] for group in groups) == kind.reaches
        assert len({group["manifest"] for group in groups}) == len(groups)
        block, stored = said["block_tokens"], here.store.stats()["commits_total"]
        for turn, size in enumerate(SIZES):
            whole = size // block
            kept = sum(whole if reach is None else min(reach, whole) for reach in kind.reaches)
            question = Question(f"{name}-{size}", token_prompt(random.Random(size), size))
            alone = replace(question, salt="alone")
            answer(prefill.address, alone)
            expected = reference(prefill.address, alone)  # from its own cache
            here.store.wait_stored(stored + kept)  # an engine stores after its answer
            loaded = external(decode)
            assert not difference(expected, answer(router.address, question))
            stored += 2 * kept
            assert here.store.stats()["commits_total"] == stored
            assert external(decode) - loaded == whole * block
            assert landings(router) == {"landed": turn + 1}
        stats = here.store.stats()
        assert stats["corrupt_total"] == stats["reserved_blocks"] == 0
    note(name, SERIES, GPU if ON_GPU else ENGINES)


def external(engine: Engine) -> int:
    """Prompt tokens that an engine has loaded."""
    return engine.prompt_tokens()["external_kv_transfer"]


def test_a_window_whose_bytes_changed_is_caught_or_changes_the_answer(here: Site) -> None:
    kind = KINDS["full, sliding window"]
    prefill, decode = here.start(kind, "prefill", "0"), here.start(kind, "decode", "1")
    with running([prefill, decode]):
        question = Question("overwritten", token_prompt(random.Random(4), SIZES[0]))
        kept, stored = blocks_kept(kind), here.store.stats()["commits_total"]
        expected = reference(prefill.address, question)
        here.store.wait_stored(stored + kept)
        overwrite_pool(here.store)
        assert not difference(expected, answer(decode.address, question))
        assert external(decode) == 0
        decode.stop()
        trusting = here.start(kind, "trusting", "1", verify=False)
        with running([trusting]):
            again = replace(question, prompt=token_prompt(random.Random(5), SIZES[0]))
            expected = reference(prefill.address, again)
            here.store.wait_stored(stored + 2 * kept)
            overwrite_pool(here.store)
            assert difference(expected, answer(trusting.address, again))
            assert external(trusting) > 0


def test_what_was_stored_before_the_weights_changed_is_not_loaded_after(here: Site) -> None:
    kind = KINDS["full, sliding window"]
    prefill = here.start(kind, "prefill", "0", update_group="a")
    decode = here.start(kind, "decode", "1", update_group="a")
    before, after = (Question(n, token_prompt(random.Random(n), SIZES[0])) for n in "ab")
    with running([prefill, decode]), here.routed(prefill, decode) as router:
        expected = answer(prefill.address, before)
        reset(decode)
        assert not difference(expected, answer(decode.address, before))
        assert external(decode) == 0
        reset(prefill)
        expected = reference(prefill.address, replace(after, salt="alone"))
        assert not difference(expected, answer(router.address, after))
        assert landings(router) == {"landed": 1}
        assert external(decode) == SIZES[0] // 32 * 32


def blocks_kept(kind: Kind) -> int:
    """Blocks that the store gets of a prompt of SIZES[0] tokens."""
    whole = SIZES[0] // 32
    return sum(whole if reach is None else min(reach, whole) for reach in kind.reaches)


def reset(engine: Engine) -> None:
    """Reset an engine's own cache and that of its connector, as for new weights."""
    path = "/reset_prefix_cache?reset_external=true"
    status, _ = ask(engine.address, "POST", path, None, 10.0)
    assert status == 200


def test_engines_go_on_beside_a_store_that_hangs_or_is_dead_and_use_it_when_it_is_back(
    here: Site, engine_folder: Path
) -> None:
    kind, port = KINDS["full, sliding window"], int(here.store.address.rpartition(":")[2])
    asked = [
        Question(f"fault-{seed}", token_prompt(random.Random(seed), 500 + 37 * seed), stream=True)
        for seed in range(10)
    ]
    others = set(Path("/dev/shm").glob("vllm_offload*"))
    with Link(("127.0.0.1", port)) as link:
        to_store: dict[str, Any] = {"url": link.url, "transport": "tcp", "deadline_s": 0.5}
        prefill = here.start(kind, "prefill", "0", **to_store)
        decode = here.start(kind, "decode", "1", **to_store)
        with running([prefill, decode]), here.routed(prefill, decode) as router:
            # What is killed leaves no memory behind: it has no name while it is used.
            assert not set(Path("/dev/shm").glob("vllm_offload*")) - others
            alone = [replace(question, salt="alone") for question in asked]
            expected = [reference(prefill.address, question) for question in alone]
            link.stall()
            got = answers(router.address, asked[:4], 4)
            link.resume()
            here.store.kill()
            got += answers(router.address, asked[4:8], 4)
            here.store = start_store(engine_folder, port=port, name="store-again")
            for engine in (prefill, decode):
                engine.wait_store_back()
            for question in asked[:4]:
                leave_early(router.address, replace(question, salt="left"))
            loaded = external(decode)
            got += answers(router.address, asked[8:], 1)
            assert [difference(*pair) for pair in zip(expected, got, strict=True)] == [""] * 10
            whole = [len(question.prompt) // 32 * 32 for question in asked[8:]]
            assert external(decode) - loaded == sum(whole)
            for engine in (prefill, decode):
                engine.wait_counter("vllm:kv_offload_cpu_cache_usage_perc", 0.0)
            held = here.store.stats()
            assert held["leases"] == held["reserved_blocks"] == 0


@pytest.mark.parametrize("name", ["full attention", "full, sliding window"])
def test_one_rank_and_two_share_in_the_canonical_layout(here: Site, name: str) -> None:
    kind, whole = KINDS[name], SIZES[0] // 32
    two = replace(kind, flags=(*kind.flags, "--tensor-parallel-size", "2"))
    kept = blocks_kept(kind)
    one, other = (
        Question(f"{name}-{seed}", token_prompt(random.Random(seed), SIZES[0])) for seed in (1, 2)
    )
    # One after the other: three ranks that spin on two cores keep each other from running.
    with running([single := here.start(kind, "single", "0", canonical_layout=True)]):
        asked = one, replace(other, salt="alone")
        expected = [reference(single.address, question) for question in asked]
        manifest = reported(single)["manifest"]
        here.store.wait_stored(2 * kept)
    with running([pair := here.start(two, "pair", "0|1", canonical_layout=True)]):
        assert reported(pair)["manifest"] == manifest
        assert not difference(expected[0], answer(pair.address, one))
        assert external(pair) == whole * 32
        answer(pair.address, other)
        here.store.wait_stored(3 * kept)
    with running([single := here.start(kind, "single", "0", canonical_layout=True)]):
        assert not difference(expected[1], answer(single.address, other))
        assert external(single) == whole * 32
    assert here.store.stats()["corrupt_total"] == 0


def test_an_engine_that_cannot_work_names_the_flag_to_set(here: Site) -> None:
    wrong = replace(KINDS["full attention"], flags=("--prefix-caching-hash-algo", "sha256"))
    refusing = here.start(wrong, "wrong", "0")
    try:
        assert "set --prefix-caching-hash-algo sha256_cbor" in refusing.wait_refused()
    finally:
        refusing.stop()
