"""The demo's requests: conversations over a few long documents, streamed, timed and checked."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from kvrouter.sim.oracle import Oracle

__all__ = ["Conversation", "Reply", "Workload", "conversations"]

DOCUMENT_CHARACTERS = 6000
REQUEST_S = 30.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SUBJECTS = ("the router", "an engine", "the store", "a lease", "a prefix", "a policy", "the slab")
_VERBS = ("keeps", "loads", "names", "waits for", "evicts", "commits", "hands over", "matches")
_OBJECTS = ("a block", "the manifest", "every part", "a slot", "its chain", "the landing", "a leg")


@dataclass(frozen=True)
class Reply:
    """One request as its client saw it. `problem` is empty where nothing went wrong so far."""

    ttft_s: float
    prompt_tokens: int
    problem: str = ""
    path: str = ""
    body: dict[str, Any] = field(default_factory=dict, repr=False)
    text: str = ""


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


class Workload:
    """Asks the router at `url`; holds answers against the oracle."""

    def __init__(
        self, session: aiohttp.ClientSession, model: str, oracle: Oracle, tokens: int
    ) -> None:
        self.url = ""
        self.under_way = 0
        self._session = session
        self._model = model
        self._oracle = oracle
        self._answer_tokens = tokens

    async def ask(self, conversation: Conversation, question: str) -> Reply:
        """One turn; the conversation remembers it. Whether it was right is for `checked` to say."""
        path, body = conversation.request(question, self._model, self._answer_tokens)
        began_s = time.monotonic()
        self.under_way += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                first_s, text, usage, problem = await self._stream(path, body)
        except (TimeoutError, aiohttp.ClientError, ValueError, KeyError) as error:
            return Reply(0.0, 0, f"{conversation.name}: {type(error).__name__} {error}")
        finally:
            self.under_way -= 1
        conversation.turns.append((question, text))
        said = problem and f"{conversation.name}: {problem}"
        return Reply(first_s - began_s, usage.get("prompt_tokens", 0), said, path, body, text)

    def checked(self, reply: Reply) -> Reply:
        """The reply, with what is wrong with its text. Apart from `ask`, for it takes time."""
        if reply.problem:
            return reply
        body, tokenizer = reply.body, self._oracle.tokenizer
        if reply.path == CHAT:
            prompt = tokenizer.render_chat(body["messages"])
        else:
            prompt = tokenizer.encode(body["prompt"])
        if reply.prompt_tokens != len(prompt):
            wrong = f"its usage counts {reply.prompt_tokens} prompt tokens, there are {len(prompt)}"
            return replace(reply, problem=wrong)
        if reply.text != self._oracle.text(prompt, self._answer_tokens):
            return replace(reply, problem=f"it said {reply.text!r}, which is wrong")
        return reply

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

    async def _stream(
        self, path: str, body: dict[str, Any]
    ) -> tuple[float, str, dict[str, Any], str]:
        """When the first text came, the text, the usage, and what was wrong with the stream."""
        first_s, text, ended = 0.0, "", False
        usage: dict[str, Any] = {}
        async with self._session.post(self.url + path, json=body) as answer:
            if answer.status != 200:
                return 0.0, "", {}, f"status {answer.status}: {(await answer.text())[:200]}"
            async for line in answer.content:
                data = line.strip().removeprefix(b"data: ")
                if not data:
                    continue
                if data == b"[DONE]":
                    ended = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    return first_s, text, usage, f"error in its stream: {event['error']}"
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    first_s = first_s or (time.monotonic() if piece else 0.0)
                    text += piece
        return first_s, text, usage, "" if ended else "its stream broke off"
