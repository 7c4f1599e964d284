"""What a request weighs in the fair queue: the tokens of its prompts and of its answers."""

from __future__ import annotations

from typing import NamedTuple

from kvrouter.openai.request import OPEN_ENDED_TOKENS, Request


class Work(NamedTuple):
    """Tokens of a request, cached or not: only some engines tell what they found cached."""

    prompt_tokens: int
    answer_tokens: int  # expected; the true number is known at its end


def work_of(request: Request) -> Work:
    """The work of `request`; each sample of each prompt counts as a request of its own.

    Many clients allow far longer answers than they get. So no answer is expected to be longer than
    that of a request without max_tokens.
    """
    answers = request.n * (1 if request.prompts is None else len(request.prompts))
    allowed = OPEN_ENDED_TOKENS if request.max_tokens is None else request.max_tokens
    return Work(request.prompt_tokens * request.n, answers * min(allowed, OPEN_ENDED_TOKENS))
