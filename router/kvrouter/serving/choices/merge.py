"""Splits a request into shares, one per prompt or sample, and merges their answers. Pure.

A share is a request of its own, spliced from the client's bytes. Indices are those of vLLM
(vllm/entrypoints/openai/completion/serving.py), seeds those of the family's engines. Choices keep
the bytes that the engine wrote; only `index` is replaced, and usage is summed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter import _native
from kvrouter.engines.families.splice import splice
from kvrouter.errors import bad_request
from kvrouter.openai.request import Request, parse
from kvrouter.openai.response import TRANSFERS
from kvrouter.openai.sse import DONE, DONE_EVENT, data_of
from kvrouter.openai.sse import event as sse_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.openai.media import Span
    from kvrouter.openai.request import Kind

    Piece = tuple["Share", bytes, int | None]

_SEED: Final = re.compile(rb"-?\d{1,19}")
_OF_ONE_STREAM: Final = ("metrics", *sorted(TRANSFERS))
"""Members about one share alone; vLLM gives no `metrics` with several choices either."""


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
            _request_of(request, prompt, alone=alone, advance=sample if varies_seeds else 0),
            index * choices,
            sample == 0,
        )
        for index, (prompt, sample) in enumerate((p, s) for p in prompts for s in samples)
    ]


def _request_of(request: Request, prompt: Span | None, *, alone: bool, advance: int) -> Request:
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


class BadShare(Exception):
    """A share's answer is not what was asked for."""


class ShareError(Exception):
    """An engine ended a share's stream with an error event."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("the engine's stream ended with an error")
        self.payload = payload  # the event's JSON, as the engine wrote it


class UsageSum:
    """Usage of all shares: prompts once, completions of every share."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] | None = None

    def add(self, share: Share, raw: bytes, cached_tokens: int | None) -> None:
        """Add one share's usage.

        Args:
            share: the share.
            raw: JSON object.
            cached_tokens: of the prefill leg; replaces the count of the decode engine, which counts
                as cached what it loaded.

        Raises:
            BadShare: it is no usage.
        """
        try:
            usage = orjson.loads(raw)
            completion = int(usage["completion_tokens"])
        except (ValueError, TypeError, KeyError):
            raise BadShare("no usage") from None
        details = usage.get("prompt_tokens_details")
        if (
            cached_tokens is not None
            and isinstance(details, dict)
            and details.get("cached_tokens") is not None
        ):
            details["cached_tokens"] = cached_tokens
        if not share.counts_prompt:
            usage |= {"prompt_tokens": 0, "total_tokens": completion}
            usage.pop("prompt_tokens_details", None)
        self._whole = usage if self._whole is None else _summed(self._whole, usage)

    @property
    def raw(self) -> bytes | None:
        """The sum as JSON; None if no share gave any.

        Raises:
            BadShare: it cannot be written: no counts of tokens are so large.
        """
        try:
            return None if self._whole is None else orjson.dumps(self._whole)
        except TypeError:
            raise BadShare("no usage") from None


def _summed(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Numbers added, objects member by member; of anything else the first that is there."""
    whole = dict(one)
    for key, value in other.items():
        held = whole.get(key)
        if isinstance(held, dict) and isinstance(value, dict):
            whole[key] = _summed(held, value)
        elif isinstance(held, int | float) and isinstance(value, int | float):
            whole[key] = held + value
        elif held is None:
            whole[key] = value
    return whole


def answer_id(kind: Kind, request_id: str) -> bytes:
    """The JSON of a merged answer's id: what vLLM makes of a request's id."""
    return orjson.dumps(("cmpl-" if kind == "completion" else "chatcmpl-") + request_id)


def merge_answers(pieces: Sequence[Piece], ident: bytes) -> bytes:
    """The whole answer, made of whole answers in the order of their choices.

    Args:
        pieces: each share, its answer and the cached tokens of its prefill leg.
        ident: JSON of the answer's id.

    Raises:
        BadShare: one is no completion, or has other choices than were asked for.
    """
    first: tuple[bytes, dict[str, Span]] | None = None
    choices: list[bytes] = []
    usage = UsageSum()
    for share, body, cached_tokens in pieces:
        spans = _members(body)
        if first is None:
            first = body, spans
        numbered = _choices(body, spans, share)
        if sorted(numbered) != list(range(share.first, share.first + share.request.n)):
            raise BadShare("other choices than were asked for")
        choices += [numbered[index] for index in sorted(numbered)]
        if (counted := _value(body, spans, "usage")) is not None:
            usage.add(share, counted, cached_tokens)
    assert first is not None
    body, spans = first
    changes = _envelope(spans, ident)
    changes["choices"] = b"[" + b",".join(choices) + b"]"
    if usage.raw is not None:
        changes["usage"] = usage.raw
    return splice(body, spans, changes)


class StreamMerge:
    """One stream made of the shares' events as they come, each passed on once.

    Args:
        ident: JSON of the stream's id.
    """

    def __init__(self, ident: bytes) -> None:
        self._ident = ident
        self._created: bytes | None = None
        self._usage = UsageSum()
        self._usage_event: tuple[int, bytes] | None = None

    def event(self, share: Share, event: bytes, cached_tokens: int | None) -> tuple[bytes, int]:
        """What the client gets of an event (empty: nothing yet), and how many choices it has.

        Args:
            share: the stream's share.
            event: without the blank line at its end.
            cached_tokens: of the share's prefill leg.

        Raises:
            BadShare: it is no event of a completion.
            ShareError: it is the engine's error.
        """
        payload = data_of(event)
        if payload is None:
            return (event + b"\n\n" if event else b""), 0
        if payload == DONE:
            return b"", 0
        spans = _members(payload)
        if "error" in spans:
            raise ShareError(payload)
        choices = _choices(payload, spans, share)
        counted = _value(payload, spans, "usage")
        if not choices and counted is not None:
            self._usage.add(share, counted, cached_tokens)
            if self._usage_event is None or share.first < self._usage_event[0]:
                self._usage_event = share.first, payload
            return b"", 0
        changes = self._changes(payload, spans)
        changes["choices"] = b"[" + b",".join(choices.values()) + b"]"
        return sse_event(splice(payload, spans, changes)), len(choices)

    def end(self) -> bytes:
        """The last events: the usage of all, if the shares gave theirs, and the end mark.

        Raises:
            BadShare: their usage cannot be summed.
        """
        last = b""
        if self._usage_event is not None:
            payload = self._usage_event[1]
            spans = _members(payload)
            changes = {**self._changes(payload, spans), "usage": self._usage.raw}
            last = sse_event(splice(payload, spans, changes))
        return last + DONE_EVENT

    def _changes(self, payload: bytes, spans: dict[str, Span]) -> dict[str, bytes | None]:
        changes = _envelope(spans, self._ident)
        if self._created is None:
            self._created = _value(payload, spans, "created")
        if self._created is not None:
            changes["created"] = self._created
        return changes


def _members(text: bytes) -> dict[str, Span]:
    try:
        return _native.scan_object(text, "")[0]
    except ValueError as error:
        raise BadShare(f"no JSON object: {error}") from None


def _value(text: bytes, spans: dict[str, Span], key: str) -> bytes | None:
    """The JSON of a member; None if it is absent or null."""
    value = text[slice(*spans[key])] if key in spans else b"null"
    return None if value == b"null" else value


def _envelope(spans: dict[str, Span], ident: bytes) -> dict[str, bytes | None]:
    changes: dict[str, bytes | None] = dict.fromkeys(k for k in _OF_ONE_STREAM if k in spans)
    changes["id"] = ident
    return changes


def _choices(text: bytes, spans: dict[str, Span], share: Share) -> dict[int, bytes]:
    """The choices of an answer or event by their index in the whole, under that index."""
    span = spans.get("choices")
    if span is None:
        raise BadShare("no choices")
    found: dict[int, bytes] = {}
    try:
        for start, end in _native.scan_array(text, *span, share.request.n):
            choice = text[start:end]
            members = _native.scan_object(choice, "")[0]
            index = int(choice[slice(*members["index"])]) if "index" in members else 0
            if not 0 <= index < share.request.n or share.first + index in found:
                raise BadShare(f"a choice numbered {index}")
            changes: dict[str, bytes | None] = dict.fromkeys(TRANSFERS & members.keys())
            changes["index"] = b"%d" % (share.first + index)
            found[share.first + index] = splice(choice, members, changes)
    except ValueError as error:
        raise BadShare(f"no choices: {error}") from None
    return found
