"""Requests as clients send them, and their answers as tokens; from threads, with deadlines."""

import http.client
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from tests.vllm.engines import ask

DEADLINE_S = 180.0
TOP_LOGPROBS = 2
TIE = 1e-3


class AskFailed(Exception):
    """An answer with another status than 200, or one that broke off."""


@dataclass(frozen=True)
class Question:
    """A completion of token ids or text, or a chat; greedy, of exactly `max_tokens` tokens."""

    name: str
    prompt: list[int] | str | list[dict[str, str]]
    chat: bool = False
    stream: bool = False
    max_tokens: int = 16
    salt: str = ""

    @property
    def path(self) -> str:
        """Where it is sent."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, *, logprobs: bool = False) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
        }
        body["messages" if self.chat else "prompt"] = self.prompt
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.salt:
            body["cache_salt"] = self.salt
        if logprobs and self.chat:
            body.update(logprobs=True, top_logprobs=TOP_LOGPROBS)
        elif logprobs:
            body["logprobs"] = TOP_LOGPROBS
        return body


@dataclass(frozen=True)
class Answer:
    """What came back. `margins`: by how much the chosen token led the next, where asked for."""

    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    margins: list[float] = field(default_factory=list)


def reference(address: str, question: Question) -> Answer:
    """The answer of one engine alone, with the margins of its choices."""
    return _send(address, replace(question, stream=False), logprobs=True)


def answer(address: str, question: Question) -> Answer:
    """The answer as a client gets it, streamed or not."""
    return _send(address, question)


def answers(address: str, questions: Sequence[Question], at_once: int) -> list[Answer]:
    """All answers, in order, with up to `at_once` questions under way."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda question: answer(address, question), questions))


def leave_early(address: str, question: Question) -> None:
    """Ask for a stream and leave after its first bytes."""
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    try:
        body = replace(question, stream=True, max_tokens=200).body()
        connection.request("POST", question.path, json.dumps(body), _headers())
        connection.getresponse().read(1)
    finally:
        connection.close()


def difference(expected: Answer, got: Answer) -> str:
    """'' where the tokens are the same or part at a tie of the reference's top two; else what."""
    for at, (want, have) in enumerate(zip(expected.tokens, got.tokens, strict=False)):
        if want != have:
            margin = expected.margins[at]
            return "" if margin <= TIE else f"token {at}: {have} for {want}, margin {margin:.4f}"
    if len(expected.tokens) != len(got.tokens):
        return f"{len(got.tokens)} tokens for {len(expected.tokens)}"
    return ""


def is_tie(expected: Answer, got: Answer) -> bool:
    """Whether the tokens differ, though only behind a tie."""
    return expected.tokens != got.tokens and not difference(expected, got)


def _headers() -> dict[str, str]:
    return {"Content-Type": "application/json"}


def _send(address: str, question: Question, *, logprobs: bool = False) -> Answer:
    body = question.body(logprobs=logprobs)
    if question.stream:
        return _streamed(address, question, body)
    status, data = ask(address, "POST", question.path, body, DEADLINE_S)
    if status != 200:
        raise AskFailed(f"{question.name}: {status} {data[:500]!r}")
    return _parse([json.loads(data)])


def _streamed(address: str, question: Question, body: dict[str, Any]) -> Answer:
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    try:
        connection.request("POST", question.path, json.dumps(body), _headers())
        response = connection.getresponse()
        if response.status != 200:
            raise AskFailed(f"{question.name}: {response.status} {response.read(500)!r}")
        return _parse(list(_events(response, question.name)))
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse, name: str) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream. Raises AskFailed where it ends without [DONE]."""
    while line := response.readline():
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise AskFailed(f"{name}: {event['error']}")
        yield event
    raise AskFailed(f"{name}: the stream broke off")


def _parse(events: Sequence[dict[str, Any]]) -> Answer:
    tokens: list[int] = []
    margins: list[float] = []
    usage: dict[str, Any] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            margins += _margins(choice.get("logprobs"))
    details = usage.get("prompt_tokens_details") or {}
    return Answer(tokens, usage["prompt_tokens"], details.get("cached_tokens") or 0, margins)


def _margins(logprobs: dict[str, Any] | None) -> list[float]:
    """The lead of the best token over the next, by position."""
    if not logprobs:
        return []
    if "content" in logprobs:
        tops = [
            [top["logprob"] for top in position["top_logprobs"]] for position in logprobs["content"]
        ]
    else:
        tops = [list(position.values()) for position in logprobs["top_logprobs"]]
    ranked = [sorted(top, reverse=True) for top in tops]
    return [top[0] - top[1] if len(top) > 1 else 0.0 for top in ranked]


WORDS = ("def", "class", "return", "import", "yield", "while", "lambda", "none", "true", "self")


def token_prompt(draw: random.Random, tokens: int, prefix: Sequence[int] = ()) -> list[int]:
    """Random token ids of the tiny model behind a given prefix, `tokens` in all."""
    return [*prefix, *(draw.randrange(10, 2000) for _ in range(tokens - len(prefix)))][:tokens]


def questions(seed: int, count: int) -> list[Question]:
    """A mix: token ids, text and chats of 5 to 3000 tokens, stream and not, some with prefixes."""
    draw = random.Random(seed)
    shared = token_prompt(draw, 700)
    mix = []
    for number in range(count):
        size = draw.choice([5, 31, 32, 33, 64, 65, 200, 500, 1000, 2000, 3000, 0])
        size = size or draw.randrange(5, 1500)
        kind = number % 4
        prompt: list[int] | str | list[dict[str, str]]
        if kind == 3:
            text = " ".join(draw.choice(WORDS) for _ in range(max(1, size // 3)))
            prompt = [{"role": "user", "content": f"{number} {text}"}]
        elif kind == 2:
            prompt = " ".join(draw.choice(WORDS) for _ in range(max(3, size // 3)))
        else:
            prompt = token_prompt(draw, size, shared[: size // 2] if kind == 1 else ())
        mix.append(
            Question(
                f"q{number}",
                prompt,
                chat=kind == 3,
                stream=draw.random() < 0.5,
                max_tokens=draw.choice([4, 16, 24]),
            )
        )
    return mix
