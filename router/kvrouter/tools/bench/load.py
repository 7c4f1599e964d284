"""Sends the prompts of a benchmark and times each answer as its client sees it."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import aiohttp
import orjson

from kvrouter.openai import sse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrouter.tools.bench.settings import BenchSettings


@dataclass(slots=True)
class Timed:
    """One request. Times are in seconds, `started_s` on the performance counter's clock.

    Attributes:
        ttft_s: from sending it to the first token.
        gaps_s: between two events that follow one another.
        latency_s: from sending it to the last token.
        prompt_tokens: as the server counted them, else as sent.
        output_tokens: as the server counted them, else events.
        error: why it failed; empty if it did not.
    """

    started_s: float
    prompt_tokens: int
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    output_tokens: int = 0
    error: str = ""


def prompts(settings: BenchSettings) -> Iterator[list[int]]:
    """The prompts of a run, the same for the same seed: a common prefix, then random ids."""
    draw = Random(settings.seed)
    ids = range(*settings.random_token_ids)
    prefix = draw.choices(ids, k=settings.random_prefix_len)
    for _ in range(settings.num_prompts):
        yield prefix + draw.choices(ids, k=settings.random_input_len)


async def send(
    session: aiohttp.ClientSession, settings: BenchSettings, model: str, prompt: Sequence[int]
) -> Timed:
    """Send one request and take its stream to the end. Failures are told, never raised."""
    body = {
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
    timed = Timed(time.perf_counter(), len(prompt))
    try:
        async with session.post(
            settings.base_url + settings.endpoint,
            data=orjson.dumps(body),
            headers={"content-type": "application/json"},
        ) as answer:
            if answer.status == 200:
                await _take(answer, timed)
            else:
                content = await answer.content.read(300)
                timed.error = f"{answer.status}: {content.decode('utf-8', 'replace')}"
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        timed.error = f"{type(error).__name__}: {error}"
    if not timed.error and not timed.latency_s:
        timed.error = "no token came"
    return timed


async def run(session: aiohttp.ClientSession, settings: BenchSettings, model: str) -> list[Timed]:
    """Send all prompts at their times; what came of each, in their order."""
    draw = Random(settings.seed)
    room = settings.max_concurrency
    limit = asyncio.Semaphore(room) if room is not None else nullcontext()

    async def one(prompt: list[int]) -> Timed:
        async with limit:
            return await send(session, settings, model, prompt)

    due_s, tasks = time.perf_counter(), []
    async with asyncio.TaskGroup() as group:
        for prompt in prompts(settings):
            tasks.append(group.create_task(one(prompt)))
            due_s += draw.expovariate(settings.request_rate)  # 0 where the rate is inf
            if (left_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
    return [task.result() for task in tasks]


async def _take(answer: aiohttp.ClientResponse, timed: Timed) -> None:
    events, last_s = 0, timed.started_s
    async for data in sse.read_data(answer.content.iter_any()):
        if data == sse.DONE:
            continue
        event = orjson.loads(data)
        if "error" in event:
            timed.error = str(event["error"])
            return
        if event.get("choices"):
            now_s = time.perf_counter()
            if events:
                timed.gaps_s.append(now_s - last_s)
            else:
                timed.ttft_s = now_s - timed.started_s
            events, last_s = events + 1, now_s
        if usage := event.get("usage"):
            timed.prompt_tokens = usage["prompt_tokens"]
            timed.output_tokens = usage["completion_tokens"]
    timed.output_tokens = timed.output_tokens or events
    timed.latency_s = last_s - timed.started_s
