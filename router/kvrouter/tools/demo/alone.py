"""What one real engine answers alone, without cache or store: the right answers of the demo."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import aiohttp
import orjson

from kvrouter.canary.verdict import first_difference, margin, tokens_of
from kvrouter.tools.demo.workload import CHAT, Reply

AT_ONCE = 8
NEAR_TIE = 1e-3


@dataclass
class Alone:
    """Asks an engine each question again, with a cache salt, so that it computes the whole prompt.

    `near_ties` counts answers that differ first where both tokens are about equally likely: a batch
    of another size rounds differently.
    """

    session: aiohttp.ClientSession
    url: str
    request_s: float
    log_probabilities: bool = True  # whether it gives any; without them nothing is a near tie
    near_ties: int = 0
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def checked(self, replies: Sequence[Reply]) -> list[Reply]:
        """The replies, each with its problem."""
        return list(await asyncio.gather(*map(self._checked, replies)))

    async def _checked(self, reply: Reply) -> Reply:
        if reply.problem:
            return reply
        try:
            async with self._room, asyncio.timeout(self.request_s):
                answer = await self._answer(reply)
            prompt_tokens = orjson.loads(answer)["usage"]["prompt_tokens"]
        except (TimeoutError, aiohttp.ClientError, LookupError, ValueError) as error:
            return replace(reply, problem=f"one engine alone: {type(error).__name__} {error}")
        if reply.prompt_tokens != prompt_tokens:
            wrong = f"its usage counts {reply.prompt_tokens} prompt tokens, not {prompt_tokens}"
            return replace(reply, problem=wrong)
        tokens, alone = list(reply.tokens), tokens_of(answer)
        difference = first_difference(tokens, alone or [])
        if difference is None:
            return reply
        chat = reply.path == CHAT
        lead = margin(answer, "chat" if chat else "completion", difference)
        if lead is not None and lead < NEAR_TIE and len(tokens) == len(alone or []):
            self.near_ties += 1
            return reply
        return replace(reply, problem=f"it answered {tokens}, one engine alone answers {alone}")

    async def _answer(self, reply: Reply) -> bytes:
        """The engine's answer, with the two likeliest tokens at each place."""
        asked = {key: value for key, value in reply.body.items() if key != "stream_options"}
        if self.log_probabilities:
            chat = reply.path == CHAT
            asked |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        asked |= {"return_tokens_as_token_ids": True, "stream": False, "cache_salt": "alone"}
        async with self.session.post(self.url + reply.path, json=asked) as answer:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {(await answer.text())[:200]}")
            return await answer.read()
