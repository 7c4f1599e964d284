"""Streams that outlive their engine: what was said so far becomes part of the prompt elsewhere.

Only where the rest is certain: greedy sampling, no state but the tokens. The engine is asked to
name the tokens of each event; the client does not see them.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.engine import Role
from kvrouter.errors import DONE_FRAME, ApiError
from kvrouter.families.splice import splice
from kvrouter.http.client import UpstreamError
from kvrouter.leg import Refused
from kvrouter.openai import parse
from kvrouter.outlet import SSE_FIELDS
from kvrouter.passage import Passage
from kvrouter.relay import Relay
from kvrouter.tidy import tidy_events

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engine import Engine
    from kvrouter.http.client import Answer
    from kvrouter.journey import Journey
    from kvrouter.leg import Legs
    from kvrouter.metrics import Metrics
    from kvrouter.openai import Request
    from kvrouter.relay import Tidy

MAX_RESUMES: Final = 3
"""Engines that one stream may outlive."""
KEPT: Final = frozenset(
    {
        "model",
        "prompt",
        "stream",
        "stream_options",
        "max_tokens",
        "min_tokens",
        "seed",
        "user",
        "priority",
        "cache_salt",
        "ignore_eos",
        "stop_token_ids",
        "top_p",
        "top_k",
        "min_p",
        "add_special_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "request_id",
        "return_token_ids",
    }
)
"""Members that mean the same for the rest of an answer as for all of it, or are put right."""
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stop": ([], ""),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "logit_bias": ({},),
}
"""Members that may stand there with these values (or null), which change nothing."""


def resumable(request: Request) -> bool:
    """Whether the rest of the answer follows from the prompt and what was said of it."""
    if request.kind != "completion" or not request.stream:
        return False
    temperature = request.raw("temperature")
    if temperature is None or orjson.loads(temperature) != 0:
        return False
    for key in request.spans:
        raw = None if key in KEPT or key == "temperature" else request.raw(key)
        if raw is not None and (key not in NEUTRAL or orjson.loads(raw) not in NEUTRAL[key]):
            return False
    return True


class StreamBroken(Exception):
    """A stream broke off after the client had seen some of it; not the fault of the next engine."""


class Spoken:
    """What a client was sent of one stream, over all engines that spoke.

    Args:
        show_ids: whether the client asked for the token ids itself.

    Attributes:
        tokens: ids of all tokens of events that were sent.
        certain: how many of them the text that was sent shows: after these another engine goes on.
            The text of those behind was held back, as of half a character.
        finish: the reason that the last event gave, None while there is none.
        told: whether every event named its tokens.
        before: how many tokens engines before the one that speaks had said.
    """

    def __init__(self, *, show_ids: bool = False) -> None:
        self._hidden = ("prompt_token_ids",) if show_ids else ("prompt_token_ids", "token_ids")
        self._show_ids = show_ids
        self.tokens: list[int] = []
        self.certain = 0
        self.finish: str | None = None
        self.told = True
        self.usage: dict[str, Any] | None = None
        self._head: dict[str, Any] = {}
        self.before = 0

    def go_on(self) -> None:
        """Another engine speaks from now on, and begins after the certain tokens."""
        del self.tokens[self.certain :]
        self.before = self.certain

    def take(self, events: bytes) -> bytes:
        """Whole events as the client may see them."""
        lines = events.split(b"\n")
        return b"\n".join(self._line(line) if line.startswith(b"data:") else line for line in lines)

    def ending(self, prompt_tokens: int | None) -> bytes:
        """What an engine that broke off after its last token still owed the client.

        Args:
            prompt_tokens: for the usage; None where the client asked for none.
        """
        owed = b""
        if prompt_tokens is not None and self.usage is None:
            spoken = len(self.tokens)
            counts = {"prompt_tokens": prompt_tokens, "completion_tokens": spoken}
            counts["total_tokens"] = prompt_tokens + spoken
            owed = b"data: " + orjson.dumps({**self._head, "choices": [], "usage": counts})
            owed += b"\n\n"
        return owed + DONE_FRAME

    def _line(self, line: bytes) -> bytes:
        data = line[5:].strip()
        if data == b"[DONE]":
            return line
        try:
            event = orjson.loads(data)
            return b"data: " + orjson.dumps(self._seen(event))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            self.told = False  # nothing that we know: it passes, and the stream is not resumed
            return line

    def _seen(self, event: dict[str, Any]) -> dict[str, Any]:
        names = ("id", "object", "created", "model")
        self._head = self._head or {name: event[name] for name in names if name in event}
        event.update(self._head)
        for choice in event["choices"]:
            ids = choice.get("token_ids")
            if not self._show_ids or self.before:
                for name in self._hidden:
                    choice.pop(name, None)
            if ids is None:
                self.told = self.told and not choice["text"]
            else:
                self.tokens += ids
            if choice["text"]:
                self.certain = len(self.tokens)
            self.finish = choice["finish_reason"] or self.finish
        usage = event.get("usage")
        if usage and self.before:
            usage["prompt_tokens"] -= self.before
            usage["completion_tokens"] += self.before
        self.usage = usage if usage and not event["choices"] else self.usage
        return event


class _Resuming:
    """The outlet of such a stream."""

    def __init__(self, legs: Legs, metrics: Metrics, spoken: Spoken) -> None:
        self._legs = legs
        self._metrics = metrics
        self._spoken = spoken

    async def stream(self, passage: Passage, engine: Engine, answer: Answer) -> None:
        """Pass a stream on, or the rest of one.

        Raises:
            StreamBroken: it broke off; nothing of it that is not whole was passed on.
        """
        exchange = passage.exchange
        if not exchange.started:
            exchange.start(200, fields=SSE_FIELDS + passage.id_line, hold=True)
        relay = Relay(exchange, answer, self._metrics.gaps.counts, self._tidy(passage))
        passage.began(monotonic())
        try:
            await relay.run(self._legs.deadlines.idle_s)
        except UpstreamError as error:
            raise StreamBroken(
                str(self._legs.failed(engine, Role.DECODE, error.failure, str(error)))
            ) from None
        passage.outcome = self._spoken.finish or "unknown"

    def _tidy(self, passage: Passage) -> Tidy:
        request, handoff = passage.request, passage.handoff
        if request is None or handoff is None or "stream_options" not in request.spans:
            return self._spoken.take
        return lambda events: tidy_events(self._spoken.take(events), handoff.cached_tokens)

    def whole(self, passage: Passage, body: bytes) -> None:
        """Never called: such a request streams."""
        raise NotImplementedError


class Resumption:
    """Serves streams that go on elsewhere where their engine dies.

    Args:
        journey: takes prompts through their legs.
        legs: counts engines that break off.
        metrics: counts what became of streams that broke off.
    """

    def __init__(self, journey: Journey, legs: Legs, metrics: Metrics) -> None:
        self._journey = journey
        self._legs = legs
        self._metrics = metrics

    async def run(self, passage: Passage, model: str) -> None:
        """As `Journey.run`, for a request that is `resumable`."""
        asked = passage.request
        assert asked is not None
        spoken = Spoken(show_ids=asked.raw("return_token_ids") == b"true")
        body = splice(asked.body, asked.spans, {"return_token_ids": b"true"})
        passage.request = parse(body, "completion", 1)
        passage.outlet = _Resuming(self._legs, self._metrics, spoken)
        leg, resumes = passage, 0
        while True:
            try:
                await self._journey.run(leg, model)
                break
            except StreamBroken as broken:
                passage.error = str(broken)
            except (ApiError, Refused) as error:
                if not passage.exchange.started:
                    raise
                passage.error = str(error)
                resumes = MAX_RESUMES
            finally:
                leg.release()
            following = self._following(leg, spoken) if resumes < MAX_RESUMES else None
            if following is None:
                self._end(passage, leg, spoken)
                break
            self._metrics.resumed.add(1, "resumed")
            leg, resumes = following, resumes + 1
            passage.attempts += 1
        passage.outcome = leg.outcome if leg.outcome != "unknown" else passage.outcome
        passage.decode_engine = leg.decode_engine
        passage.generated = len(spoken.tokens)

    def _following(self, leg: Passage, spoken: Spoken) -> Passage | None:
        """The rest of the answer as a request of its own; None where it is over or not certain."""
        request = leg.request
        ids = _prompt_ids(leg)
        if spoken.finish or not spoken.told or ids is None or request is None:
            return None
        said = spoken.certain - spoken.before
        rest = (request.max_tokens or 0) - said
        if rest < 1:
            return None
        spoken.go_on()
        prompt = ids[:-1] + b"".join(b",%d" % token for token in spoken.tokens[-said:]) + b"]"
        changes: dict[str, bytes | None] = {"max_tokens": b"%d" % rest}
        changes["prompt"] = prompt if said else ids
        least = request.raw("min_tokens")
        if least is not None:
            changes["min_tokens"] = b"%d" % max(0, int(least) - said)
        now_s = monotonic()
        following = Passage(leg.exchange, leg.outlet, leg.request_id, leg.fields, now_s)
        following.request = parse(splice(request.body, request.spans, changes), "completion", 1)
        return following

    def _end(self, passage: Passage, leg: Passage, spoken: Spoken) -> None:
        """End a stream that is not resumed: well, where its last token had come."""
        exchange = passage.exchange
        if spoken.finish and leg.request is not None:
            options = orjson.loads(leg.request.raw("stream_options") or b"{}")
            ids = _prompt_ids(leg) if options.get("include_usage") else None
            counted = ids.count(b",") + 1 - spoken.before if ids is not None else None
            exchange.write(spoken.ending(counted))
            leg.outcome = spoken.finish
        else:
            self._metrics.resumed.add(1, "given up")
            exchange.write(ApiError(502, "The engine's answer broke off.").frame())
            leg.outcome = "broken"
        exchange.end()


def _prompt_ids(leg: Passage) -> bytes | None:
    """The prompt's token ids as JSON, where anybody has told them."""
    request, handoff = leg.request, leg.handoff
    if request is not None and request.ids is not None:
        return request.raw("prompt")
    if leg.tokens is not None:
        return leg.tokens.json
    return handoff.prompt_token_ids if handoff is not None else None
