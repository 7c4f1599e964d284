"""What the lines of a record say of prompts, and what they do not tell."""

import asyncio
import json
from array import array
from collections.abc import Mapping
from hashlib import blake2b
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.engine import HashDomain
from kvrouter.openai.request import parse
from kvrouter.prefix.hash_cache import HashCache
from kvrouter.prefix.learnt import learnt_names
from kvrouter.serving.recording import MOST_TOKENS, NAMED_TOKENS, Recorder
from kvrouter.serving.request.context import RequestContext, RequestOutcome, Timing
from kvrouter_store.identity.chain import root_hash

Line = dict[str, Any]


class Sink:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def write(self, lines: bytes) -> None:
        self.lines += map(json.loads, lines.splitlines())


def recorder(**more: Any) -> tuple[Recorder, list[Line]]:
    sink = Sink()
    made = Recorder(more.get("session_key"), more.get("kv_bytes"), cast("Any", sink))
    return made, sink.lines


def asked(
    ids: list[int],
    block_tokens: int | None = 16,
    *,
    model: str = "m",
    headers: Mapping[str, str] | None = None,
    counted: int | None = None,
) -> RequestContext:
    """A request for a prompt of these tokens; their hashes are unknown without `block_tokens`."""
    exchange = SimpleNamespace(headers=headers or {}, path="/v1/completions", status=200)
    context = RequestContext(cast("Any", exchange), "id", b"", Timing(monotonic()))
    context.request = parse(json.dumps({"model": model, "prompt": ids}).encode(), "completion", 1)
    context.model = model
    decode = SimpleNamespace(manifest="manifest")
    context.route.plan = cast("Any", SimpleNamespace(decode=decode))
    context.outcome = RequestOutcome(reason="stop", generated=7, prompt_tokens=counted)
    if block_tokens is not None:
        domain = context.prompt.domain = HashDomain(block_tokens, root_hash(None))
        context.prompt.hashes = HashCache().hashes(array("I", ids).tobytes(), domain)
    return context


def record(made: Recorder, *contexts: RequestContext) -> None:
    async def take() -> None:
        for context in contexts:
            made.take(context, context.timing.started_s + 2.0)

    asyncio.run(take())
    made.flush()


def names(*contexts: RequestContext) -> list[list[int]]:
    made, lines = recorder()
    record(made, *contexts)
    return [line["hash_ids"] for line in lines]


@given(
    shared=st.integers(0, 3000),
    own=st.tuples(st.integers(1, 1200), st.integers(1, 1200)),
    block_tokens=st.sampled_from([16, 64, 128, 512, 528, 1056]),
)
def test_prompts_share_the_names_of_the_pieces_that_are_equal(
    shared: int, own: tuple[int, int], block_tokens: int
) -> None:
    """A piece has the name of the blocks that cover it, so they must be equal too."""
    first, other = ([*range(shared), *[9000 + n] * more] for n, more in enumerate(own))
    one, two = names(asked(first, block_tokens), asked(other, block_tokens))
    for ids, prompt in ((one, first), (two, other)):
        assert len(ids) == -(-len(prompt) // NAMED_TOKENS)  # as AIPerf and AISimulate check
        assert len(set(ids)) == len(ids)
        assert all(0 <= name < 1 << 32 for name in ids)
    same = shared // block_tokens * block_tokens // NAMED_TOKENS
    assert one[:same] == two[:same]
    if len(first) != len(other):  # else the last pieces may have the same whole blocks
        assert not set(one[same:]) & set(two[same:])


def test_equal_prompts_have_equal_names_and_longer_ones_another_last_one() -> None:
    prompt = list(range(600))
    once, again, longer = names(asked(prompt), asked(prompt), asked([*prompt, 1]))
    assert once == again
    assert (once[0], once[1] != longer[1]) == (longer[0], True)


def test_names_tell_nothing_to_who_knows_the_prompt() -> None:
    """They differ from record to record, and are not made of block hashes alone."""
    one, other = names(asked(list(range(600)))), names(asked(list(range(600))))
    assert not set(one[0]) & set(other[0])


def test_other_models_have_other_names() -> None:
    one, other = names(asked(list(range(600))), asked(list(range(600)), model="n"))
    assert not set(one) & set(other)


def test_prompts_whose_hashes_are_unknown_share_nothing() -> None:
    one, other = names(asked(list(range(1030)), None), asked(list(range(1030)), None))
    assert len({*one, *other}) == 6


def test_texts_that_engines_do_not_name_share_what_begins_alike() -> None:
    text = "All work and no play makes Jack a dull boy. " * 100
    contexts = []
    for tokens, more in ((1101, "One."), (1102, "Two two.")):
        context = asked([1], None, counted=tokens)
        body = json.dumps({"model": "m", "prompt": text + more}).encode()
        context.request = parse(body, "completion", 1)
        context.prompt.learnt = learnt_names(HashCache(), context.request, "m")
        contexts.append(context)
    one, other = names(*contexts)
    assert (len(one), one[:2]) == (3, other[:2])
    assert one[2] != other[2]


def test_a_line_has_lengths_times_session_and_outcome_and_no_text() -> None:
    made, lines = recorder(session_key="x-mine")
    context = asked(list(range(40)), headers={"x-mine": "somebody"}, counted=41)
    context.timing.first_s = context.timing.started_s + 0.5
    record(made, context, asked([1], headers={"x-session-id": "somebody"}), asked([1]))
    first = lines[0]
    assert {**first, "timestamp": 0, "hash_ids": [], "session": ""} == {
        "timestamp": 0,
        "input_length": 41,
        "output_length": 7,
        "hash_ids": [],
        "session": "",
        "model": "m",
        "outcome": "stop",
        "ttft_ms": pytest.approx(500, abs=0.01),
        "total_ms": pytest.approx(2000, abs=0.01),
    }
    assert 0 <= first["timestamp"] < 60_000
    assert lines[1]["session"] == first["session"] != blake2b(b"somebody").hexdigest()[:16]
    assert lines[2]["session"] is None
    assert "somebody" not in json.dumps(lines)


def test_each_share_of_a_request_is_a_prompt() -> None:
    made, lines = recorder()
    whole = asked([1, 2, 3])
    whole.shares = [asked([1] * 40), asked([2] * 50)]
    record(made, whole)
    assert [line["input_length"] for line in lines] == [40, 50]
    assert {line["outcome"] for line in lines} == {"stop"}


def test_what_no_engine_got_is_not_recorded() -> None:
    made, lines = recorder()
    refused = asked([1, 2, 3])
    refused.route.plan = None
    record(made, refused)
    assert lines == []


def test_an_engine_cannot_make_a_line_as_long_as_it_likes() -> None:
    made, lines = recorder()
    record(made, asked([1], counted=1 << 60), asked([1], counted=-5))
    assert [len(line["hash_ids"]) for line in lines] == [MOST_TOKENS // NAMED_TOKENS, 1]


def test_stores_of_other_sizes_are_told_of_prompts_whose_kv_has_a_size() -> None:
    sizes = {"manifest": 1024.0}
    made, _ = recorder(kv_bytes=lambda manifest: sizes.get(manifest, 0))
    assert made.store_sizes() == {}
    prompt = list(range(8 * 4096))
    record(made, *[asked(prompt, 4096)] * 2)
    size = 8 * 4096 * 1024
    assert made.store_sizes()[2 * size] == pytest.approx(0.5)
    assert made.curve.found(0.3 * size) == pytest.approx(2 / 16)
    sizes.clear()
    record(made, asked([1] * 4096, 4096))
    assert max(made.store_sizes().values()) == pytest.approx(0.5)
