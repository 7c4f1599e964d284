"""Checks that engines of one model make the same tokens of the same text and conversation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.canary.verdict import first_difference
from kvrouter.prefix.tokenize import TRIAL_TEXT, LocalTokenizer, TokenizerUnavailable
from kvrouter.tools.doctor.base import Finding, Found, Setup, error
from kvrouter.tools.doctor.engines import model_groups, odd_ones

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.tools.doctor.engines import EngineFacts

    TokenIds = tuple[int, ...]

MESSAGES: Final = (
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And twice that?"},
)
OWN: Final = "this router's --tokenizer"


async def tokenizer(setup: Setup) -> Found:
    """Engines of one model, and --tokenizer, tokenize a text in the same way."""
    for model, group in model_groups(setup.known_engines):
        ids = await _ask_all(setup, group, {"model": model, "prompt": TRIAL_TEXT})
        if setup.settings.tokenizer is not None:
            try:
                own = LocalTokenizer(setup.settings.tokenizer)
            except TokenizerUnavailable as problem:
                remedy = "give --tokenizer the folder of the model, or leave it out"
                yield error("this host", str(problem), remedy)
                return
            ids[OWN] = tuple(own.encode(TRIAL_TEXT))
        remedy = "load the same tokenizer files everywhere (--tokenizer, --tokenizer-revision)"
        for found in _compare(ids, f"a trial text for {model}", remedy):
            yield found


async def chat_template(setup: Setup) -> Found:
    """Engines of one model render a conversation in the same way."""
    for model, group in model_groups(setup.known_engines):
        body = {"model": model, "messages": list(MESSAGES)}
        ids = await _ask_all(setup, group, body)
        text = await _ask_all(setup, group, {"model": model, "prompt": TRIAL_TEXT})
        if odd_ones(text) is None:  # else the tokenizers differ, and their check reports it
            remedy = "give all engines the same --chat-template and tokenizer_config.json"
            for found in _compare(ids, f"a trial conversation for {model}", remedy):
                yield found


def _compare(ids: dict[str, TokenIds], what: str, remedy: str) -> Iterator[Finding]:
    odd = odd_ones(ids)
    if odd is None:
        return
    names, mine, others = odd
    difference = first_difference(mine, others)
    assert difference is not None
    yield error(
        ", ".join(names),
        f"{what} is {len(mine)} tokens there and {len(others)} elsewhere, which differ from "
        f"number {difference.at} on: the legs would see different prompts and find no KV",
        remedy,
    )


async def _ask_all(
    setup: Setup, group: list[EngineFacts], body: dict[str, Any]
) -> dict[str, TokenIds]:
    """The token ids that engines answer, by name, without those that have no /tokenize."""
    answers = await asyncio.gather(*(token_ids(setup, each, body) for each in group))
    return {each.name: ids for each, ids in zip(group, answers, strict=True) if ids is not None}


async def token_ids(setup: Setup, facts: EngineFacts, body: dict[str, Any]) -> TokenIds | None:
    """The token ids that an engine answers to a body of /tokenize, or None."""
    answer = await setup.ask(facts.engine, "/tokenize", orjson.dumps(body))
    try:
        return tuple(map(int, orjson.loads(answer or b"")["tokens"]))
    except (ValueError, TypeError, KeyError):
        return None
