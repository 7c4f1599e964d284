"""The demo's requests: conversations over a few long documents, streamed, timed and checked."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from kvrouter.openai import sse

__all__ = ["CHAT", "COMPLETIONS", "Conversation", "Reply", "Workload", "conversations"]

DOCUMENT_CHARACTERS = 6000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SUBJECTS = ("the router", "an engine", "the store", "a lease", "a prefix", "a policy", "the slab")
_VERBS = ("keeps", "loads", "names", "waits for", "evicts", "commits", "hands over", "matches")
_OBJECTS = ("a block", "the manifest", "every part", "a slot", "its chain", "the landing", "a leg")


@dataclass(frozen=True)
class Reply:
    """One request as its client saw it. `problem` is empty where nothing went wrong so far.

    `tokens`: ids, where the request asked for them.
    """

    ttft_s: float
    prompt_tokens: int
    problem: str = ""
    path: str = ""
    body: dict[str, Any] = field(default_factory=dict, repr=False)
    text: str = ""
    tokens: tuple[int, ...] = ()


@dataclass
class Conversation:
    """Turns about one document, by chat or by completions."""

    name: str
    document: str
    chat: bool
    turns: list[tuple[str, str]] = field(default_factory=list)

    def request(self, question: str, model: str, answer_tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body of the next turn."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        if self.chat:
            return CHAT, {**body, "messages": self._messages(question)}
        return COMPLETIONS, {**body, "prompt": self._prompt(question)}

    def _messages(self, question: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.document}]
        for asked, answered in self.turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        return [*messages, {"role": "user", "content": question}]

    def _prompt(self, question: str) -> str:
        said = "".join(f"Q: {asked}\nA: {answered}\n" for asked, answered in self.turns)
        return f"{self.document}\n{said}Q: {question}\nA: "


def conversations(documents: int, count: int, seed: int = 7) -> list[Conversation]:
    """`count` conversations over `documents` documents; every second document is for chats."""
    draw = random.Random(seed)
    texts = [_document(draw, index) for index in range(documents)]
    return [
        Conversation(f"c{index}", texts[index % documents], chat=index % documents % 2 == 0)
        for index in range(count)
    ]


def _document(draw: random.Random, index: int) -> str:
    text = f"Document {index}. "
    while len(text) < DOCUMENT_CHARACTERS:
        words = (draw.choice(_SUBJECTS), draw.choice(_VERBS), draw.choice(_OBJECTS))
        text += " ".join(words).capitalize() + ". "
    return text[:DOCUMENT_CHARACTERS]


@dataclass(frozen=True)
class Streamed:
    """What a stream held: when its first text came, the whole, and what was wrong with it."""

    first_s: float
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    tokens: tuple[int, ...] = ()


class Workload:
    """Asks the router at `url`, in streams of `tokens` tokens; `more` is in every request."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        model: str,
        tokens: int,
        *,
        request_s: float = 30.0,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = ""
        self.under_way = 0
        self._session = session
        self._model = model
        self._answer_tokens = tokens
        self._request_s = request_s
        self._more = dict(more or {})

    async def ask(self, conversation: Conversation, question: str) -> Reply:
        """One turn; the conversation remembers it. Whether it was right is for others to say."""
        path, body = conversation.request(question, self._model, self._answer_tokens)
        body |= self._more
        began_s = time.monotonic()
        self.under_way += 1
        try:
            async with asyncio.timeout(self._request_s):
                came = await self._stream(path, body)
        except (TimeoutError, aiohttp.ClientError, ValueError, KeyError) as error:
            return Reply(0.0, 0, f"{conversation.name}: {type(error).__name__} {error}")
        finally:
            self.under_way -= 1
        conversation.turns.append((question, came.text))
        problem = came.problem and f"{conversation.name}: {came.problem}"
        ttft_s, prompt_tokens = came.first_s - began_s, came.usage.get("prompt_tokens", 0)
        return Reply(ttft_s, prompt_tokens, problem, path, body, came.text, came.tokens)

    async def run(
        self,
        every: Sequence[Conversation],
        turns: int,
        concurrency: int,
        done: Callable[[Reply], None],
    ) -> list[Reply]:
        """Hold all conversations, `concurrency` at a time, each turn after turn."""
        replies: list[Reply] = []
        room = asyncio.Semaphore(concurrency)

        async def hold(conversation: Conversation) -> None:
            async with room:
                for turn in range(turns):
                    question = f"What does part {turn} of {conversation.name} say?"
                    reply = await self.ask(conversation, question)
                    replies.append(reply)
                    done(reply)

        async with asyncio.TaskGroup() as group:
            for conversation in every:
                group.create_task(hold(conversation))
        return replies

    async def _stream(self, path: str, body: dict[str, Any]) -> Streamed:
        first_s, text, ended = 0.0, "", False
        usage: dict[str, Any] = {}
        tokens: list[int] = []
        async with self._session.post(self.url + path, json=body) as answer:
            if answer.status != 200:
                problem = f"status {answer.status}: {(await answer.text())[:200]}"
                return Streamed(0.0, problem=problem)
            async for data in sse.read_data(answer.content.iter_any()):
                if data == sse.DONE:
                    ended = True
                    continue
                event = orjson.loads(data)
                if "error" in event:
                    problem = f"error in its stream: {event['error']}"
                    return Streamed(first_s, text, usage, problem)
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    tokens += choice.get("token_ids") or []
                    if piece or choice.get("token_ids"):
                        first_s = first_s or time.monotonic()
                    text += piece
        problem = "" if ended else "its stream broke off"
        return Streamed(first_s or time.monotonic(), text, usage, problem, tuple(tokens))
