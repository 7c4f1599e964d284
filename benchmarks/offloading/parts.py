"""What is measured: each part starts its engines, and returns rows of figures."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median
from typing import Any

from tests.vllm.engines import ON_GPU, Engine
from tests.vllm.services import start_router

from benchmarks.offloading.rig import (
    FORMS,
    Answer,
    Rig,
    Wrong,
    ask,
    ask_all,
    client,
    computed,
    empty,
    external,
    figures_of,
    prompts,
)
from benchmarks.planner_load import Ask, requests

Rows = list[dict[str, Any]]
STREAMS, STREAM_TOKENS, ALONE_S = 8, 4000, 1.5
HITS, OUTPUT_TOKENS = 6, 128
LONGEST_TOKENS = 12_000 if ON_GPU else 2048  # of a conversation
LEAST_LOADED = 0.95
SHARED = ("store", "other")


def lengths(rig: Rig, sizes: Sequence[int], count: int) -> Rows:
    """Time to the first token by length: computed, and from the store or private memory."""
    sittings = (("none", "store", "native"), ("none", "packed"))  # what fits in 80 GiB
    rows: Rows = []
    for sitting in sittings if "packed" in FORMS else sittings[:1]:
        forms = [form for form in sitting if form in FORMS]
        with rig.engines(max(sizes) + 4096, *forms) as engines:
            for size in sizes:
                rows += _length(rig, engines, prompts(size + len(rows), count, size))
    return rows


def _length(rig: Rig, engines: dict[str, Engine], asked: Sequence[Sequence[int]]) -> Rows:
    first = asyncio.run(_turns(engines, asked))
    rig.landed()
    for engine in engines.values():
        asyncio.run(empty(engine.address))
    loading = {form: engine for form, engine in engines.items() if form != "none"}
    loaded = {form: external(engine) for form, engine in loading.items()}
    second = asyncio.run(_turns(loading, asked))
    for form, engine in loading.items():
        if (came := external(engine) - loaded[form]) < LEAST_LOADED * sum(map(len, asked)):
            raise Wrong(f"{form} loaded {came} tokens")
    rows = []
    for what, answers in (("computed", first), ("hit", second)):
        for form, each in answers.items():
            if [one.tokens for one in each] != [one.tokens for one in first["none"]]:
                raise Wrong(f"{form}, {what}: answers differ")
            ttft_ms = [round(1e3 * one.ttft_s, 1) for one in each]
            row = {"tokens": len(asked[0]), "engine": form, "what": what}
            rows.append(figures_of(**row, ttft_ms=median(ttft_ms), all=ttft_ms))
    return rows


async def _turns(
    engines: dict[str, Engine], asked: Sequence[Sequence[int]]
) -> dict[str, list[Answer]]:
    """Each prompt to each engine, one at a time; they take turns in being the first."""
    answers: dict[str, list[Answer]] = {form: [] for form in engines}
    names = list(engines)
    async with client() as http:
        for number, prompt in enumerate(asked):
            turn = number % len(names)
            for form in names[turn:] + names[:turn]:
                answers[form].append(await ask(http, engines[form].address, prompt))
    return answers


def at_once(rig: Rig, size: int, count: int) -> Rows:
    """All prompts at once, twice; the engine's own cache is emptied between."""
    rows: Rows = []
    asked = prompts(1, count, size)
    forms = [form for form in ("store", "other", "native") if form in FORMS]
    for form in forms:
        with rig.engines(count * (size + OUTPUT_TOKENS + 64) + 4096, form) as engines:
            engine = engines[form]
            for turn in ("second",) if form == "other" else ("first", "second"):
                before = engine.prompt_tokens()
                answers = asyncio.run(ask_all(engine.address, asked, OUTPUT_TOKENS))
                ttft_ms = round(1e3 * mean(each.ttft_s for each in answers), 1)
                row = {"tokens": size, "prompts": count, "engine": form, "turn": turn}
                tokens = computed(engine, before)
                rows.append(figures_of(**row, mean_ttft_ms=ttft_ms, computed=tokens))
                rig.landed()
                asyncio.run(empty(engine.address))
    return rows


def streams(rig: Rig, size: int) -> Rows:
    """Pauses of running streams, alone and beside prompts that are loaded or computed."""
    rows: Rows = []
    for form in [form for form in ("none", "store", "native") if form in FORMS]:
        with rig.engines(streamed_tokens(size), form) as engines:
            rows += asyncio.run(_beside(rig, form, engines[form], size))
    return rows


def streamed_tokens(size: int) -> int:
    """Of all streams and prompts of `streams`."""
    return STREAMS * (1100 + STREAM_TOKENS) + 2 * HITS * size


async def _beside(rig: Rig, form: str, engine: Engine, size: int) -> Rows:
    known = prompts(2, HITS, size)
    for prompt in known:
        await ask_all(engine.address, [prompt])
    rig.landed()
    await empty(engine.address)
    running: list[Answer] = []
    async with client() as http:
        tasks = [
            asyncio.ensure_future(ask(http, engine.address, prompt, STREAM_TOKENS, running))
            for prompt in prompts(3, STREAMS, 1024)
        ]
        await _begun(running)

        async def one_by_one(asked: Sequence[Sequence[int]]) -> None:
            for prompt in asked:
                await ask(http, engine.address, prompt)
                await asyncio.sleep(0.15)

        rows = [await _phase(form, "alone", running, lambda: asyncio.sleep(ALONE_S))]
        if form != "none":
            before = external(engine)
            rows.append(await _phase(form, "hits", running, lambda: one_by_one(known)))
            if (came := external(engine) - before) < LEAST_LOADED * HITS * size:
                raise Wrong(f"{form} loaded {came} tokens beside streams")
        new = prompts(4, HITS, size)
        rows.append(await _phase(form, "computed", running, lambda: one_by_one(new)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rows


async def _begun(running: Sequence[Answer]) -> None:
    """An answer tells nobody that it goes on."""
    while sum(len(each.came_s) >= 20 for each in running) < STREAMS:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def _phase(
    form: str, beside: str, running: Sequence[Answer], work: Callable[[], Awaitable[None]]
) -> dict[str, Any]:
    begun = time.monotonic()
    await work()
    ended = time.monotonic()
    gaps: list[float] = []
    for each in running:
        came = [at for at in each.came_s if begun <= at <= ended]
        gaps += [1e3 * (b - a) for a, b in pairwise(came)]
    gaps.sort()
    if not gaps:
        raise Wrong(f"{form}: no stream went on beside {beside}")
    itl_ms = {f"p{p}": round(gaps[min(len(gaps) - 1, len(gaps) * p // 100)], 2) for p in (50, 99)}
    return figures_of(engine=form, beside=beside, itl_ms=itl_ms)


def legs(rig: Rig, size: int, count: int) -> Rows:
    """New prompts through both legs, beside one engine that computes them alone."""
    took: dict[str, list[float]] = {"both legs": [], "alone": []}
    with rig.engines(4 * size, "store", "other", "none") as engines:
        store, other = engines["store"], engines["other"]
        flags = ["--prefill-threshold", "0"]
        router = start_router(rig.folder, [store.url], [other.url], rig.store.url, flags)
        try:
            for engine, role in ((store, "prefill"), (other, "decode")):
                router.wait_log(f"engine {engine.address} joins as {role}")
            for prompt in prompts(5, count + 2, size):
                (alone,) = asyncio.run(ask_all(engines["none"].address, [prompt], 2))
                (both,) = asyncio.run(ask_all(router.address, [prompt], 2))
                if alone.tokens != both.tokens:
                    raise Wrong("both legs: answers differ")
                took["alone"].append(1e3 * alone.ttft_s)
                took["both legs"].append(1e3 * both.ttft_s)
        finally:
            router.stop()
    return [
        figures_of(tokens=size, what=what, ttft_ms=round(median(values[2:]), 1))
        for what, values in took.items()
    ]


def fleet(rig: Rig, seconds: float, per_s: float) -> Rows:
    """Conversations at their own pace on two engines behind the router: shared or private memory.

    All host memory together is the same.
    """
    asked = [
        replace(each, prompt=tuple(10 + i % 2000 for i in each.prompt[:LONGEST_TOKENS]))
        for each in requests(11, seconds, per_s)
    ]
    private = ("native", "native 2") if "native" in FORMS else ("none", "none 2")
    halves = replace(rig, host_bytes=rig.host_bytes // 2)
    return [_conversations(each, pair, asked) for each, pair in ((rig, SHARED), (halves, private))]


def _conversations(rig: Rig, pair: tuple[str, str], asked: Sequence[Ask]) -> dict[str, Any]:
    most = max(len(each.prompt) + each.max_tokens for each in asked)
    with rig.engines(4 * most, *pair) as engines:
        url = rig.store.url if pair == SHARED else None
        router = start_router(rig.folder, [], [each.url for each in engines.values()], url)
        try:
            for engine in engines.values():
                router.wait_log(f"engine {engine.address} joins")
            before = {name: engine.prompt_tokens() for name, engine in engines.items()}
            answers = asyncio.run(_at_their_times(router.address, asked))
        finally:
            router.stop()
        tokens = sum(computed(engine, before[name]) for name, engine in engines.items())
    mean_ms = round(1e3 * mean(each.ttft_s for each in answers), 1)
    return figures_of(engines=pair, requests=len(asked), mean_ttft_ms=mean_ms, computed=tokens)


async def _at_their_times(address: str, asked: Sequence[Ask]) -> list[Answer]:
    begun = time.monotonic()
    async with client() as http:

        async def one(each: Ask) -> Answer:
            await asyncio.sleep(max(0.0, begun + each.at_s - time.monotonic()))
            return await ask(http, address, each.prompt, each.max_tokens)

        return list(await asyncio.gather(*map(one, asked)))
