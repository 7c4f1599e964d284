"""No answer of an engine keeps the router's loop from other streams, whatever is in it."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import pytest
from tests.integration.gaps.meter import MOST_S

from kvrouter.engines.engine import Engine, Role
from kvrouter.openai.response import tidy_answer, tidy_events
from kvrouter.openai.sse import MAX_EVENT_BYTES, event
from kvrouter.openai.token_events import SentTokens
from kvrouter.prefix.tokenize import TokenSource
from kvrouter.serving.legs.failures import Refused, Words
from kvrouter.serving.legs.verdict import GaveUp, look

TRANSFER = b'"kv_transfer_params":{}'
BYTES = MAX_EVENT_BYTES - 1000


def many(item: bytes) -> bytes:
    """An answer with transfer parameters in its middle, and with as many of `item` as fit."""
    items = b",".join([item] * (BYTES // 2 // (len(item) + 1)))
    return b'{"choices":[%b],%b,"y":[%b]}' % (items, TRANSFER, items)


ANSWERS: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: many(b"1"),
    "lists": lambda: many(b"[]"),
    "objects": lambda: many(b"{}"),
    "members": lambda: (
        b"{%b,%b}" % (TRANSFER, b",".join(b'"%07d":{}' % n for n in range(BYTES // 14)))
    ),
    "depth": lambda: b'{"a":%b,%b}' % (b"[" * BYTES, TRANSFER),
    "escapes": lambda: b'{"a":"%b",%b,"b":1}' % (b'\\"' * (BYTES // 2), TRANSFER),
    "names of members": lambda: b'{"a":"%b"}' % (b'"cached_tokens":' * (BYTES // 16)),
    "details without an end": lambda: b'{"prompt_tokens_details":{' + b" " * BYTES,
}
EVENTS: dict[str, Callable[[], bytes]] = {
    "lines without data": lambda: b"data:\n" * (BYTES // 6) + b"data: {%b}\n\n" % TRANSFER,
    "marked lines": lambda: b"data: {%b}\n" % TRANSFER * (BYTES // 31) + b"\n",
    "lines of lists": lambda: b"data: []\n" * (BYTES // 9) + b"data: {%b}\n\n" % TRANSFER,
    "blank lines": lambda: b"\n" * BYTES + b"data: {%b}\n\n" % TRANSFER,
}


def looked(body: bytes) -> None:
    with suppress(GaveUp):
        look(body)


READERS: dict[str, Callable[[bytes], Any]] = {
    "tidied": lambda body: tidy_answer(body, 5),
    "looked at": lambda body: looked(body.replace(b"choices", b"others")),
    "a refusal": lambda body: Refused(Words(400, body), Role.DECODE).events(),
    "token ids": lambda body: SentTokens().rewrite_answer(body),
}
STREAMS: dict[str, Callable[[bytes], Any]] = {
    "tidied": lambda events: tidy_events(events, 5),
    "token ids": lambda events: SentTokens().rewrite(events),
}


def assert_short(read: Callable[[bytes], Any], text: bytes) -> None:
    begun_s = time.thread_time()
    read(text)
    assert time.thread_time() - begun_s < MOST_S


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("reader", READERS)
def test_the_longest_answer_that_is_kept_is_read_within_a_turn(reader: str, answer: str) -> None:
    assert_short(READERS[reader], ANSWERS[answer]())


@pytest.mark.parametrize("events", [*ANSWERS, *EVENTS])
@pytest.mark.parametrize("reader", STREAMS)
def test_the_longest_event_is_read_within_a_turn(reader: str, events: str) -> None:
    text = EVENTS[events]() if events in EVENTS else event(ANSWERS[events]())
    assert_short(STREAMS[reader], text)


def test_an_answer_with_many_log_probabilities_loses_its_transfer_parameters() -> None:
    top = [{"token": "a", "logprob": -1.5, "bytes": [97]}] * 20
    content = [{"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": top}] * 2000
    answer = {
        "choices": [{"logprobs": {"content": content}, "kv_transfer_params": {"a": 1}}],
        "kv_transfer_params": {"a": 1},
        "usage": {},
    }
    body = orjson.dumps(answer)
    del answer["kv_transfer_params"], answer["choices"][0]["kv_transfer_params"]  # type: ignore[index]
    assert orjson.loads(tidy_answer(body, None)) == answer


TOKENS: dict[str, Callable[[], bytes]] = {
    "many": lambda: b'{"count":1,"tokens":[%b]}' % b",".join([b"7"] * (BYTES // 2)),
    "lists": lambda: b'{"tokens":[%b]}' % b",".join([b"[]"] * (BYTES // 3)),
    "others": lambda: b'{"tokens":[1],"x":[%b]}' % b",".join([b"[]"] * (BYTES // 3)),
    "depth": lambda: b'{"tokens":' + b"[" * BYTES,
}


@pytest.mark.parametrize("answer", TOKENS)
async def test_the_longest_answer_with_token_ids_is_read_within_a_turn(answer: str) -> None:
    text = TOKENS[answer]()

    async def post(*_: object) -> bytes:
        return text

    source, engine = TokenSource(post), Engine("127.0.0.1:9", Role.DECODE)
    try:
        begun_s = time.thread_time()
        await source.tokens([engine], "m", b"{}", None)
        assert time.thread_time() - begun_s < MOST_S
    finally:
        source.close()
