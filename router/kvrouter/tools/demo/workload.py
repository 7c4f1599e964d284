"""The demo's requests: conversations about a few long documents."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from kvrouter.openai import sse
from kvrouter.openai.endpoints import CHATS, COMPLETIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrouter.tools.sim.kv_bytes import Oracle

_SHOWN_CHARACTERS: Final = 300
DOCUMENT_CHARACTERS = 6000
REQUEST_S = 30.0
_SUBJECTS = ("the router", "an engine", "the store", "a lease", "a prefix", "a policy", "the slab")
_VERBS = ("keeps", "loads", "names", "waits for", "evicts", "commits", "hands over", "matches")
_OBJECTS = ("a block", "the manifest", "every part", "a slot", "its chain", "the landing", "a leg")


@dataclass
class Reply:
    """One request and its answer."""

    ttft_s: float = 0.0  # from sending it to the first token
    prompt_tokens: int = 0  # as the server counted them
    problem: str = ""  # why it failed, or what is wrong; empty if none is known
    path: str = ""
    body: dict[str, Any] = field(default_factory=dict, repr=False)  # of the request
    text: str = ""  # of all choices

    async def stream(self, session: aiohttp.ClientSession, url: str) -> None:
        """Send the request, and read its answer. Never raises for what the server does."""
        started_s = time.perf_counter()
        try:
            async with (
                asyncio.timeout(REQUEST_S),
                session.post(url + self.path, json=self.body) as response,
            ):
                if response.status == 200:
                    await self._read(response, started_s)
                else:
                    content = await response.text(errors="replace")
                    self.problem = f"status {response.status}: {content[:_SHOWN_CHARACTERS]}"
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            self.problem = f"{type(error).__name__}: {error}"

    async def _read(self, response: aiohttp.ClientResponse, started_s: float) -> None:
        ended = False
        async for data in sse.read_data(response.content.iter_any()):
            if data == sse.DONE:
                ended = True
                continue
            event = orjson.loads(data)
            if "error" in event:
                self.problem = f"error in its stream: {event['error']}"
                return
            tokens = [self._take_choice(choice) for choice in event.get("choices") or ()]
            if any(tokens) and not self.ttft_s:
                self.ttft_s = time.perf_counter() - started_s
            if usage := event.get("usage"):
                self.prompt_tokens = usage["prompt_tokens"]
        if not ended:
            self.problem = "its stream broke off"
        elif not self.ttft_s:
            self.problem = "no token came"

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        """Whether the choice of an event has a token: the first event of a chat has only a role."""
        text = choice.get("text")
        content = text if text is not None else (choice.get("delta") or {}).get("content")
        self.text += content or ""
        return bool(text is not None or content)

    def check(self, oracle: Oracle, answer_tokens: int) -> None:
        """Note what is wrong. This takes CPU time: do it when no request is in flight."""
        body, tokenizer = self.body, oracle.tokenizer
        if self.problem:
            return
        if self.path == CHATS:
            prompt = tokenizer.render_chat(body["messages"])
        else:
            prompt = tokenizer.encode(body["prompt"])
        if self.prompt_tokens != len(prompt):
            counted = f"its usage counts {self.prompt_tokens} prompt tokens"
            self.problem = f"{counted}, there are {len(prompt)}"
        elif self.text != oracle.text(prompt, answer_tokens):
            self.problem = f"it answered {self.text!r}, which is wrong"


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
            return CHATS, {**body, "messages": self._messages(question)}
        return COMPLETIONS, {**body, "prompt": self._prompt(question)}

    def _messages(self, question: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.document}]
        for asked, answered in self.turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        return [*messages, {"role": "user", "content": question}]

    def _prompt(self, question: str) -> str:
        turns = "".join(f"Q: {asked}\nA: {answered}\n" for asked, answered in self.turns)
        return f"{self.document}\n{turns}Q: {question}\nA: "


def conversations(documents: int, count: int) -> list[Conversation]:
    """`count` conversations over `documents` documents; every second document is for chats."""
    draw = random.Random(7)
    texts = [_document(draw, index) for index in range(documents)]
    return [
        Conversation(f"c{index}", texts[index % documents], index % documents % 2 == 0)
        for index in range(count)
    ]


def _document(draw: random.Random, index: int) -> str:
    text = f"Document {index}. "
    while len(text) < DOCUMENT_CHARACTERS:
        words = (draw.choice(_SUBJECTS), draw.choice(_VERBS), draw.choice(_OBJECTS))
        text += " ".join(words).capitalize() + ". "
    return text[:DOCUMENT_CHARACTERS]


@dataclass(eq=False)
class Workload:
    """Sends conversations to the router at `url`."""

    session: aiohttp.ClientSession
    model: str
    answer_tokens: int

    def __post_init__(self) -> None:
        self.url = ""
        self.in_flight = 0

    async def ask(self, conversation: Conversation, question: str) -> Reply:
        """One turn, which the conversation remembers. Does not check the text."""
        path, body = conversation.request(question, self.model, self.answer_tokens)
        reply = Reply(path=path, body=body)
        self.in_flight += 1
        try:
            await reply.stream(self.session, self.url)
        finally:
            self.in_flight -= 1
        conversation.turns.append((question, reply.text))
        reply.problem = reply.problem and f"{conversation.name}: {reply.problem}"
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
