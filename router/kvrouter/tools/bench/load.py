"""Sends the prompts of a benchmark at their times."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from random import Random
from typing import TYPE_CHECKING, Any

from kvrouter.tools.timed_stream import TimedAnswer, stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import aiohttp

    from kvrouter.tools.bench.settings import BenchSettings


def prompts(settings: BenchSettings) -> Iterator[list[int]]:
    """The prompts of a run, equal for equal seeds: a common prefix, then random ids."""
    draw = Random(settings.seed)
    ids = range(*settings.random_token_ids)
    prefix = draw.choices(ids, k=settings.random_prefix_len)
    for _ in range(settings.num_prompts):
        yield prefix + draw.choices(ids, k=settings.random_input_len)


async def send(
    session: aiohttp.ClientSession, settings: BenchSettings, model: str, prompt: Sequence[int]
) -> TimedAnswer:
    """Send one request and read its answer to the end."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": settings.random_output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.temperature is not None:
        body["temperature"] = settings.temperature
    url = settings.base_url + settings.endpoint
    return await stream(session, url, body, prompt_tokens=len(prompt))


async def run(
    session: aiohttp.ClientSession, settings: BenchSettings, model: str
) -> list[TimedAnswer]:
    """Send all prompts at their times; the answers in the order of the prompts."""
    draw = Random(settings.seed)
    room = settings.max_concurrency
    limit = asyncio.Semaphore(room) if room is not None else nullcontext()

    async def one(prompt: list[int]) -> TimedAnswer:
        async with limit:
            return await send(session, settings, model, prompt)

    due_s, tasks = time.perf_counter(), []
    async with asyncio.TaskGroup() as group:
        for prompt in prompts(settings):
            tasks.append(group.create_task(one(prompt)))
            due_s += draw.expovariate(settings.request_rate)  # 0 if the rate is inf
            if (left_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
    return [task.result() for task in tasks]
