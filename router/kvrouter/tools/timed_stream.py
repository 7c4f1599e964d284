"""A streamed completion or chat as its client sees it, with the times of its tokens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from kvrouter.openai import sse

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN_CHARACTERS: Final = 300


@dataclass(slots=True)
class TimedAnswer:
    """One request and its answer. Times are in seconds.

    Attributes:
        started_s: when it was sent, on the performance counter's clock.
        prompt_tokens: as the server counted them; until then as given.
        ttft_s: from sending it to the first token.
        gaps_s: between two events that follow one another.
        latency_s: from sending it to the last token.
        output_tokens: as the server counted them, else events.
        text, token_ids: of all choices; ids only if the request asked for them.
        error: why it failed; empty if it did not.
    """

    started_s: float
    prompt_tokens: int
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    output_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    error: str = ""


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    *,
    prompt_tokens: int = 0,
    timeout_s: float | None = None,
) -> TimedAnswer:
    """Send a request that streams, and read its answer to the end.

    Never raises for what the server does: `error` says it.
    """
    answer = TimedAnswer(time.perf_counter(), prompt_tokens)
    headers = {"content-type": "application/json"}
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(url, data=orjson.dumps(body), headers=headers) as response,
        ):
            if response.status == 200:
                await _read(response, answer)
            else:
                content = await response.text(errors="replace")
                answer.error = f"status {response.status}: {content[:_SHOWN_CHARACTERS]}"
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read(response: aiohttp.ClientResponse, answer: TimedAnswer) -> None:
    events, last_s, ended = 0, answer.started_s, False
    async for data in sse.read_data(response.content.iter_any()):
        if data == sse.DONE:
            ended = True
            continue
        event = orjson.loads(data)
        if "error" in event:
            answer.error = f"error in its stream: {event['error']}"
            return
        tokens = [_take_choice(choice, answer) for choice in event.get("choices") or ()]
        if any(tokens):
            now_s = time.perf_counter()
            if events:
                answer.gaps_s.append(now_s - last_s)
            else:
                answer.ttft_s = now_s - answer.started_s
            events, last_s = events + 1, now_s
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.output_tokens = usage.get("completion_tokens", 0)
    answer.output_tokens = answer.output_tokens or events
    answer.latency_s = last_s - answer.started_s
    if not ended:
        answer.error = "its stream broke off"
    elif not events:
        answer.error = "no token came"


def _take_choice(choice: dict[str, Any], answer: TimedAnswer) -> bool:
    """Whether the choice of an event has a token: the first event of a chat has only a role."""
    text, ids = choice.get("text"), choice.get("token_ids") or []
    content = text if text is not None else (choice.get("delta") or {}).get("content")
    answer.text += content or ""
    answer.token_ids += ids
    return bool(text is not None or content or ids)
