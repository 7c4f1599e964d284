"""The demo's requests: conversations about a few long documents."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvrouter.tools.demo.timed_stream import stream

DOCUMENT_CHARACTERS = 6000
REQUEST_S = 30.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SUBJECTS = ("the router", "an engine", "the store", "a lease", "a prefix", "a policy", "the slab")
_VERBS = ("keeps", "loads", "names", "waits for", "evicts", "commits", "hands over", "matches")
_OBJECTS = ("a block", "the manifest", "every part", "a slot", "its chain", "the landing", "a leg")


@dataclass(frozen=True)
class Reply:
    """One request and its answer. `problem` is empty if none is known."""

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
        turns = "".join(f"Q: {asked}\nA: {answered}\n" for asked, answered in self.turns)
        return f"{self.document}\n{turns}Q: {question}\nA: "


def conversations(documents: int, count: int, seed: int = 7) -> list[Conversation]:
    """`count` conversations over `documents` documents; every second document is for chats."""
    draw = random.Random(seed)
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
        self.in_flight += 1
        try:
            answer = await stream(self.session, self.url + path, body, timeout_s=REQUEST_S)
        finally:
            self.in_flight -= 1
        conversation.turns.append((question, answer.text))
        problem = answer.error and f"{conversation.name}: {answer.error}"
        return Reply(answer.ttft_s, answer.prompt_tokens, problem, path, body, answer.text)

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
