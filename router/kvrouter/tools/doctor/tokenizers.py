"""Checks of whether engines of one model make the same tokens of the same text and conversation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.canary.verdict import first_difference
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.prefix.tokenize import TRIAL_TEXT, LocalTokenizer, TokenizerUnavailable
from kvrouter.tools.doctor.base import Check, SetUp, error
from kvrouter.tools.doctor.engines import model_groups, odd_ones

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.tools.doctor.base import Finding, Found
    from kvrouter.tools.doctor.engine_facts import EngineFacts

MESSAGES: Final = (
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And twice that?"},
)
OWN: Final = "this router's --tokenizer"


async def _text(setup: SetUp) -> Found:
    """The trial text, at every engine and in the router's own tokenizer."""
    for model, group in model_groups(await setup.known_engines()):
        ids = await _ask_all(setup, group, {"model": model, "prompt": TRIAL_TEXT})
        if setup.settings.tokenizer is not None:
            try:
                own = LocalTokenizer(setup.settings.tokenizer)
            except TokenizerUnavailable as problem:
                remedy = "give --tokenizer the folder of the model, or leave it out"
                yield error("this host", str(problem), remedy)
                return
            ids[OWN] = tuple(own.encode(TRIAL_TEXT))
        how = "load the same tokenizer files everywhere (--tokenizer, --tokenizer-revision)"
        for found in _compare(ids, f"a trial text for {model}", how):
            yield found


async def _conversation(setup: SetUp) -> Found:
    for model, group in model_groups(await setup.known_engines()):
        body = {"model": model, "messages": list(MESSAGES)}
        ids = await _ask_all(setup, group, body)
        text = await _ask_all(setup, group, {"model": model, "prompt": TRIAL_TEXT})
        if odd_ones(text) is None:  # else the tokenizer is what differs
            how = "give all engines the same --chat-template and tokenizer_config.json"
            for found in _compare(ids, f"a trial conversation for {model}", how):
                yield found


def _compare(ids: dict[str, tuple[int, ...]], what: str, how: str) -> Iterator[Finding]:
    odd = odd_ones(ids)
    if odd is None:
        return
    names, mine, others = odd
    difference = first_difference(mine, others)
    assert difference is not None
    yield error(
        ", ".join(names),
        f"{what} is {len(mine)} tokens there and {len(others)} elsewhere, which differ from "
        f"number {difference.at} on: legs would not see one prompt, and no KV would be found",
        how,
    )


async def _ask_all(
    setup: SetUp, group: list[EngineFacts], body: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """The token ids that engines answer, by name; without those that have no /tokenize."""
    answers = await asyncio.gather(*(token_ids(setup, each, body) for each in group))
    return {each.name: ids for each, ids in zip(group, answers, strict=True) if ids is not None}


async def token_ids(
    setup: SetUp, facts: EngineFacts, body: dict[str, Any]
) -> tuple[int, ...] | None:
    """The token ids that an engine answers to a body of /tokenize; None where it tells none."""
    timeout_s = setup.settings.health_timeout_s
    try:
        raw = orjson.dumps(body)
        answer = await setup.asker.ask(facts.engine, "/tokenize", raw, timeout_s)
        return tuple(map(int, orjson.loads(answer.body)["tokens"]))
    except (ProbeFailed, ValueError, TypeError, KeyError):
        return None


CHECKS: Final = (
    Check("tokenizer", "engines of one model, and --tokenizer, tokenise a text alike", _text),
    Check("chat-template", "engines of one model render a conversation alike", _conversation),
)
