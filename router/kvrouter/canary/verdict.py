"""What a replay says of an answer: where they differ, and by how little. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.openai.request import Kind


class CanaryOutcome(StrEnum):
    """What became of one sample."""

    EQUAL = "equal"
    NEAR_TIE = "near tie"  # they differ first where two tokens were about as likely
    DIVERGED = "diverged"
    FAILED = "failed"  # the engine did not answer the replay, or named no tokens
    SKIPPED = "skipped"  # no quiet moment, too many samples, or the engine is gone


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers part.

    Attributes:
        at: number of the token, from 0.
        served: what the client was sent there; None: nothing any more.
        alone: what the engine says that computes all by itself; None likewise.
    """

    at: int
    served: int | None
    alone: int | None


def first_difference(served: Sequence[int], alone: Sequence[int]) -> Difference | None:
    """Where two answers part; None where they are equal."""
    for at, (one, other) in enumerate(zip(served, alone, strict=False)):
        if one != other:
            return Difference(at, one, other)
    if len(served) == len(alone):
        return None
    at = min(len(served), len(alone))
    return Difference(
        at, served[at] if at < len(served) else None, alone[at] if at < len(alone) else None
    )


def tokens_of(answer: bytes) -> list[int] | None:
    """The token ids of the only choice of a whole answer; None where it does not name them."""
    try:
        return list(map(int, orjson.loads(answer)["choices"][0]["token_ids"]))
    except (ValueError, TypeError, KeyError, IndexError):
        return None


def margin(answer: bytes, kind: Kind, difference: Difference) -> float | None:
    """By how much the one token is likelier than the other at their place, in logarithms.

    Args:
        answer: whole, of a request for the log-probabilities of the two likeliest tokens, named as
            `token_id:N`.
        kind: of that request.
        difference: the place and the tokens.

    Returns:
        None where the answer does not tell of both tokens: then it was no tie.
    """
    try:
        told = orjson.loads(answer)["choices"][0]["logprobs"]
        found = _likeliest(told, kind, difference.at)
        return abs(found[f"token_id:{difference.served}"] - found[f"token_id:{difference.alone}"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def _likeliest(told: dict[str, Any], kind: Kind, at: int) -> dict[str, float]:
    if kind == "completion":
        found: dict[str, float] = told["top_logprobs"][at]
        return found
    return {each["token"]: each["logprob"] for each in told["content"][at]["top_logprobs"]}
