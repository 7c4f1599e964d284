"""Streams that another engine can continue: the rest follows from their tokens. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.openai.request import Kind, Request

KEPT: Final = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "seed",
        "best_of",
        "user",
        "priority",
        "cache_salt",
        "ignore_eos",
        "stop_token_ids",
        "top_p",
        "top_k",
        "min_p",
        "logit_bias",
        "allowed_token_ids",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "parallel_tool_calls",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "request_id",
        "return_token_ids",
    }
)
"""Members that mean the same for the rest of an answer as for all of it, or are corrected."""
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "echo": (False,),
    "stop": ([], ""),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
}
NEUTRAL: Final[Mapping[Kind, Mapping[str, tuple[object, ...]]]] = {
    "completion": _NEUTRAL,
    "chat": {
        **_NEUTRAL,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "include_reasoning": (True,),
    },
}
"""Members that change nothing if they have these values, or null."""


def resumable(request: Request) -> bool:
    """Whether the rest of the answer depends only on its prompt and its tokens so far.

    Greedy or drawn at random: the odds of the next token are the same at another engine. Not with a
    seed, which promises the same draws: another engine would draw the first ones again.
    """
    return request.stream and _plain(request) and (request.raw("seed") is None or _greedy(request))


def comparable(request: Request) -> bool:
    """Whether the tokens of its answer follow from its prompt, at any engine.

    Greedy requests without members that the router does not know; near ties of two tokens may
    still fall either way.
    """
    return _greedy(request) and _plain(request)


def _plain(request: Request) -> bool:
    """Whether it has only members that mean the same for any part of an answer."""
    neutral = NEUTRAL[request.kind]
    for key in request.spans:
        raw = None if key in KEPT else request.raw(key)
        if raw is not None and (key not in neutral or orjson.loads(raw) not in neutral[key]):
            return False
    return True


def _greedy(request: Request) -> bool:
    temperature = request.raw("temperature")
    return temperature is not None and orjson.loads(temperature) == 0
