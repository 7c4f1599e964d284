"""Compares an answer with its replay: where they differ, and by how much. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from kvrouter.http.bounded_json import read_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.openai.request import Kind


class CanaryOutcome(StrEnum):
    """The outcome of one sample."""

    EQUAL = "equal"
    NEAR_TIE = "near tie"  # at the first difference both tokens were about as likely
    DIVERGED = "diverged"
    FAILED = "failed"  # the engine did not answer the replay, or named no tokens
    SKIPPED = "skipped"  # its engine was never idle, too many samples, or the engine is gone


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two answers."""

    at: int  # place of the token, from 0
    served: int | None  # token of the client's answer; None: it had ended
    alone: int | None  # token of the replay; None: it had ended


def first_difference(served: Sequence[int], alone: Sequence[int]) -> Difference | None:
    """The first difference of two answers; None if they are equal."""
    for at, (one, other) in enumerate(zip_longest(served, alone)):
        if one != other:
            return Difference(at, one, other)
    return None


def tokens_of(answer: bytes) -> list[int] | None:
    """The token ids of the only choice of a whole answer; None without them."""
    try:
        return list(map(int, read_answer(answer)["choices"][0]["token_ids"]))
    except (ValueError, TypeError, KeyError, IndexError):
        return None


def margin(answer: bytes, kind: Kind, difference: Difference) -> float | None:
    """Difference of the log-probabilities of the two tokens.

    Args:
        answer: to a request for the two likeliest tokens, named as `token_id:N`.
        kind: of that request.
        difference: the place and the tokens.

    Returns:
        None if the answer lacks one of the tokens: then it was no tie.
    """
    try:
        logprobs = read_answer(answer)["choices"][0]["logprobs"]
        found = _likeliest(logprobs, kind, difference.at)
        return abs(found[f"token_id:{difference.served}"] - found[f"token_id:{difference.alone}"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def _likeliest(logprobs: dict[str, Any], kind: Kind, at: int) -> dict[str, float]:
    if kind == "completion":
        found: dict[str, float] = logprobs["top_logprobs"][at]
        return found
    return {each["token"]: each["logprob"] for each in logprobs["content"][at]["top_logprobs"]}
