"""A streamed completion or chat as its client sees it, with the times of its tokens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from kvrouter.openai import sse

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN_CHARACTERS: Final = 300


@dataclass(slots=True)
class TimedAnswer:
    """One request and its answer.

    Attributes:
        prompt_tokens: as the server counted them.
        ttft_s: from sending it to the first token.
        text: of all choices.
        error: why it failed; empty if it did not.
    """

    prompt_tokens: int = 0
    ttft_s: float = 0.0
    text: str = ""
    error: str = ""


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    *,
    timeout_s: float,
) -> TimedAnswer:
    """Send a request that streams, and read its answer to the end.

    Never raises for what the server does: `error` says it.
    """
    answer = TimedAnswer()
    headers = {"content-type": "application/json"}
    started_s = time.perf_counter()
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(url, data=orjson.dumps(body), headers=headers) as response,
        ):
            if response.status == 200:
                await _read(response, answer, started_s)
            else:
                content = await response.text(errors="replace")
                answer.error = f"status {response.status}: {content[:_SHOWN_CHARACTERS]}"
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read(response: aiohttp.ClientResponse, answer: TimedAnswer, started_s: float) -> None:
    ended = False
    async for data in sse.read_data(response.content.iter_any()):
        if data == sse.DONE:
            ended = True
            continue
        event = orjson.loads(data)
        if "error" in event:
            answer.error = f"error in its stream: {event['error']}"
            return
        tokens = [_take_choice(choice, answer) for choice in event.get("choices") or ()]
        if any(tokens) and not answer.ttft_s:
            answer.ttft_s = time.perf_counter() - started_s
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
    if not ended:
        answer.error = "its stream broke off"
    elif not answer.ttft_s:
        answer.error = "no token came"


def _take_choice(choice: dict[str, Any], answer: TimedAnswer) -> bool:
    """Whether the choice of an event has a token: the first event of a chat has only a role."""
    text = choice.get("text")
    content = text if text is not None else (choice.get("delta") or {}).get("content")
    answer.text += content or ""
    return bool(text is not None or content)
