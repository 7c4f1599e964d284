"""Where the answer of a decode leg goes: onto the client's connection, or into a merge with others.

The seam between the legs of one prompt, which know no client, and what a client gets of them.
"""

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.engine import Role
from kvrouter.errors import ApiError
from kvrouter.http.client import UpstreamError
from kvrouter.http.head import SSE_HEADERS, encode_headers
from kvrouter.relay import Relay
from kvrouter.tidy import answer_usage, tidy_answer, tidy_events

if TYPE_CHECKING:
    from kvrouter.engine import Engine
    from kvrouter.http.client import Answer
    from kvrouter.leg import Legs
    from kvrouter.metrics import Metrics
    from kvrouter.passage import Passage

SSE_FIELDS: Final = encode_headers(SSE_HEADERS)


class Outlet(Protocol):
    """Takes the answer of one decode leg. From its first call on no other engine can answer.

    It calls `Passage.began` when the answer's first byte goes on, and fills `Passage.outcome` and
    `Passage.generated`.
    """

    async def stream(self, passage: Passage, engine: Engine, answer: Answer) -> None:
        """Pass on a stream whose first piece is there, to its end; the caller closes `answer`."""

    def whole(self, passage: Passage, body: bytes) -> None:
        """Pass on an answer that came whole."""


class Direct:
    """The outlet of a request that is one prompt: its answer is the client's, byte for byte.

    Args:
        legs: counts engines that break off; knows their deadlines.
        metrics: counts and times.
    """

    def __init__(self, legs: Legs, metrics: Metrics) -> None:
        self._legs = legs
        self._metrics = metrics

    async def stream(self, passage: Passage, engine: Engine, answer: Answer) -> None:
        """Pass a stream on; one that breaks off ends with an error event."""
        exchange = passage.exchange
        passage.began(monotonic())
        exchange.start(200, fields=SSE_FIELDS + passage.answer_fields, hold=True)
        relay = self.relay(passage, answer)
        passage.tap = relay
        try:
            await relay.run(self._legs.deadlines.idle_s)
        except UpstreamError as error:
            failed = self._legs.failed(engine, Role.DECODE, error.failure, str(error))
            passage.error = str(failed)
            passage.outcome = "broken"
            if relay.ended():
                passage.outcome = relay.finish_reason()
            else:
                relay.fail(ApiError(502, "The engine's answer broke off."))
        else:
            passage.outcome = relay.finish_reason()
            if _wants_usage(passage):
                compare_prompts(passage, relay.prompt_tokens(), self._metrics)
        finally:  # also where the client leaves: what it has got was generated for it
            passage.generated = relay.generated

    def relay(self, passage: Passage, answer: Answer) -> Relay:
        """What passes a stream on as the client may see it."""
        tidy = partial(tidy_events, cached_tokens=passage.cached_tokens)
        return Relay(passage.exchange, answer, self._metrics.gaps.buckets, tidy)

    def whole(self, passage: Passage, body: bytes) -> None:
        """Answer, without transfer parameters and with the prefill leg's cached tokens."""
        note_answer(passage, body, self._metrics)
        body = tidy_answer(body, passage.cached_tokens)
        passage.exchange.respond(200, body, fields=passage.answer_fields)


def _wants_usage(passage: Passage) -> bool:
    return passage.request is not None and "stream_options" in passage.request.spans


def note_answer(passage: Passage, body: bytes, metrics: Metrics) -> None:
    """A decode leg's whole answer is there: what it tells goes to the passage."""
    passage.began(monotonic())
    prompt, completion, passage.outcome = answer_usage(body)
    passage.generated = completion or 0
    compare_prompts(passage, prompt, metrics)


def compare_prompts(passage: Passage, prompt_tokens: int | None, metrics: Metrics) -> None:
    """Count a prompt that the decode engine tokenised otherwise than the prefill engine."""
    told = passage.handoff.prompt_tokens if passage.handoff is not None else None
    if told is not None and prompt_tokens is not None and prompt_tokens != told:
        metrics.usage_mismatch[()] += 1
