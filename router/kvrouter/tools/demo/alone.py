"""What one real engine says alone, without a cache or a store: what the demo's answers must be."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from kvrouter.tools.demo.workload import CHAT, Reply

__all__ = ["Alone"]

AT_ONCE = 8
NEAR_TIE = 1e-3
TOP = 2


@dataclass
class Alone:
    """Asks an engine each question again, under a salt that keeps what others computed from it.

    `near_ties` counts answers that took another token only where the engine's own two best were
    closer than the rounding of a batch of another size.
    """

    session: aiohttp.ClientSession
    url: str
    request_s: float
    near_ties: int = 0
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def checked(self, replies: Sequence[Reply]) -> list[Reply]:
        """The replies, each with what is wrong with it."""
        return list(await asyncio.gather(*map(self._held_against, replies)))

    async def _held_against(self, reply: Reply) -> Reply:
        if reply.problem:
            return reply
        try:
            async with self._room, asyncio.timeout(self.request_s):
                tokens, margins, prompt_tokens = await self._said(reply)
        except (TimeoutError, aiohttp.ClientError, LookupError, ValueError) as error:
            return replace(reply, problem=f"one engine alone: {type(error).__name__} {error}")
        if reply.prompt_tokens != prompt_tokens:
            wrong = f"its usage counts {reply.prompt_tokens} prompt tokens, not {prompt_tokens}"
            return replace(reply, problem=wrong)
        said = list(reply.tokens)
        if said == tokens:
            return reply
        at = _parting(said, tokens)
        if at < len(margins) and margins[at] < NEAR_TIE and len(said) == len(tokens):
            self.near_ties += 1
            return reply
        wrong = f"it said {said}, one engine alone says {tokens}"
        return replace(reply, problem=wrong)

    async def _said(self, reply: Reply) -> tuple[list[int], list[float], int]:
        """Token ids, by how much each led the next best one, and tokens of the prompt."""
        asked = {key: value for key, value in reply.body.items() if key != "stream_options"}
        best: dict[str, Any] = {"logprobs": TOP}
        if reply.path == CHAT:
            best = {"logprobs": True, "top_logprobs": TOP}
        body = {**asked, **best, "stream": False, "cache_salt": "alone"}
        async with self.session.post(self.url + reply.path, json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {(await answer.text())[:200]}")
            said = await answer.json()
        choice = said["choices"][0]
        return choice["token_ids"], _margins(choice["logprobs"]), said["usage"]["prompt_tokens"]


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    """Where two lists first differ."""
    same = (each == its for each, its in zip(one, other, strict=False))
    return next((at for at, equal in enumerate(same) if not equal), min(len(one), len(other)))


def _margins(logprobs: dict[str, Any]) -> list[float]:
    """The lead of the best token over the next, by position, as chats or completions say it."""
    if "content" in logprobs:
        tops = [[top["logprob"] for top in each["top_logprobs"]] for each in logprobs["content"]]
    else:
        tops = [list(each.values()) for each in logprobs["top_logprobs"]]
    ranked = [sorted(top, reverse=True) for top in tops]
    return [top[0] - top[1] if len(top) > 1 else 0.0 for top in ranked]
