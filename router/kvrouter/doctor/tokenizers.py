"""Checks of whether engines of one model make the same tokens of the same text and conversation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.doctor.base import Check, Finding, SetUp, Severity
from kvrouter.doctor.engines import model_groups, odd_ones
from kvrouter.introduce import ProbeFailed
from kvrouter.tokens import TRIAL_TEXT, LocalTokenizer, TokenizerUnavailable

if TYPE_CHECKING:
    from kvrouter.doctor.engine_facts import EngineFacts

MESSAGES: Final = (
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And twice that?"},
)
OWN: Final = "this router's --tokenizer"


async def _text(setup: SetUp) -> list[Finding]:
    """The trial text, at every engine and in the router's own tokenizer."""
    found = []
    for model, group in model_groups(await setup.known_engines()):
        ids = await _ask_all(setup, group, {"model": model, "prompt": TRIAL_TEXT})
        if setup.settings.tokenizer is not None:
            try:
                own = LocalTokenizer(setup.settings.tokenizer)
            except TokenizerUnavailable as error:
                remedy = "give --tokenizer the folder of the model, or leave it out"
                return [Finding(Severity.ERROR, "this host", str(error), remedy)]
            ids[OWN] = tuple(own.encode(TRIAL_TEXT))
        found += _compare(
            ids,
            f"of a trial text for {model}",
            "load the same tokenizer files everywhere (--tokenizer, --tokenizer-revision)",
        )
    return found


async def _conversation(setup: SetUp) -> list[Finding]:
    found = []
    for model, group in model_groups(await setup.known_engines()):
        body = {"model": model, "messages": list(MESSAGES)}
        ids = await _ask_all(setup, group, body)
        text = await _ask_all(setup, group, {"model": model, "prompt": TRIAL_TEXT})
        if odd_ones(text) is None:  # else the tokenizer is what differs
            found += _compare(
                ids,
                f"of a trial conversation for {model}",
                "give all engines the same --chat-template and tokenizer_config.json",
            )
    return found


def _compare(ids: dict[str, tuple[int, ...]], of_what: str, how: str) -> list[Finding]:
    odd = odd_ones(ids)
    if odd is None:
        return []
    names, mine, others = odd
    at = next(
        (at for at, (a, b) in enumerate(zip(mine, others, strict=False)) if a != b),
        min(len(mine), len(others)),
    )
    finding = (
        f"{of_what[3:]} is {len(mine)} tokens there and {len(others)} elsewhere, which differ from "
        f"number {at} on: legs would not see one prompt, and no KV would be found"
    )
    return [Finding(Severity.ERROR, ", ".join(names), finding, how)]


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
