"""Splits a request into shares: one per prompt, or per sample of a prompt. Pure.

A share is a request of its own, spliced from the client's bytes. Indices are those of vLLM
(vllm/entrypoints/openai/completion/serving.py), seeds those of the family's engines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvrouter.engines.families.splice import splice
from kvrouter.errors import bad_request
from kvrouter.openai.request import Request, Span, parse

_SEED: Final = re.compile(rb"-?\d{1,19}")


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a request."""

    request: Request  # that engines get
    first: int  # index of its first choice among those of the whole; it has `request.n`
    counts_prompt: bool = True  # False: the prompt counts in the usage of another sample


def split(request: Request, *, alone: bool, varies_seeds: bool = True) -> list[Share]:
    """The shares of `request`, in the order of their choices.

    Args:
        request: as parsed, with its original bytes.
        alone: each sample is a share; else the engine samples `n` times from one prompt.
        varies_seeds: whether the number of a sample is added to its seed.

    Raises:
        ApiError: 400: a prompt is wrong.
    """
    if request.prompts is None and not alone:
        return [Share(request, 0)]
    prompts: list[Span | None] = [*request.prompts] if request.prompts is not None else [None]
    samples = range(request.n if alone else 1)
    choices = request.n // len(samples)
    return [
        Share(
            _part(request, prompt, alone=alone, advance=sample if varies_seeds else 0),
            index * choices,
            sample == 0,
        )
        for index, (prompt, sample) in enumerate((p, s) for p in prompts for s in samples)
    ]


def _part(request: Request, prompt: Span | None, *, alone: bool, advance: int) -> Request:
    """The request of one prompt; with `alone` of one sample, with `advance` added to its seed."""
    body, spans = request.body, request.spans
    changes: dict[str, bytes | None] = {}
    if prompt is not None:
        changes["prompt"] = body[prompt[0] : prompt[1]]
    if alone:
        changes.update(dict.fromkeys({"n", "best_of"} & spans.keys()))
        seed = request.raw("seed")
        if seed is not None:
            changes["seed"] = _advanced(seed, advance)
    part = parse(splice(body, spans, changes), request.kind, request.n)
    if part.prompts is not None:
        raise bad_request("Token ids in `prompt` must be integers of 0 to 4294967295.", "prompt")
    return part


def _advanced(seed: bytes, sample: int) -> bytes:
    if not _SEED.fullmatch(seed):
        raise bad_request("`seed` must be an integer.", "seed")
    return b"%d" % (int(seed) + sample)
