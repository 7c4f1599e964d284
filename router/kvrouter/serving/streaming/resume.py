"""Streams that outlive their engine: another one gets what was sent so far as part of the prompt.

Only if the rest is certain, or as likely as it was. The engine is asked to name the tokens of each
event; the client does not see them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.splice import splice
from kvrouter.errors import ApiError
from kvrouter.http.client.pool import EngineResponse, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.openai import sse
from kvrouter.openai.request import Request, parse
from kvrouter.openai.response import tidy_events
from kvrouter.openai.token_events import SentTokens
from kvrouter.prefix.tokenize import PromptTokens
from kvrouter.serving.legs.failures import Refused
from kvrouter.serving.request.context import RequestContext, ResponseSink, Timing
from kvrouter.serving.streaming.relay import ClientSink, Relay, begin_events, broke_off

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.openai.request import Kind
    from kvrouter.serving.legs.leg import EngineClient
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.telemetry.metrics import Metrics

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
MAX_RESUMES: Final = 3  # engines that one stream may outlive


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


class StreamBroken(Exception):
    """A stream broke off after the client had seen some of it; not the fault of the next engine."""


class _ResumingSink(ClientSink):
    """The sink of such a stream, if it is all of the client's answer."""

    def __init__(
        self, client: EngineClient, metrics: Metrics, sent: SentTokens, first: RequestContext
    ) -> None:
        super().__init__(client, metrics)
        self._sent = sent
        self._first = first

    async def stream(self, context: RequestContext, engine: Engine, answer: EngineResponse) -> None:
        """Pass a stream on, or the rest of one.

        Raises:
            StreamBroken: it broke off; only whole events were passed on.
        """
        exchange, sent, cached = context.exchange, self._sent, self._first.route.cached_tokens

        def tidy(events: bytes) -> bytes:
            seen = sent.rewrite(events)
            leave_if_failed(answer, sent)
            return tidy_events(seen, cached)

        context.answer_began()
        begin_events(context)
        relay = Relay(exchange, answer, self.gaps(context), tidy, every=True)
        self._first.stream = relay
        try:
            await relay.run(self._client.deadlines.idle_s, end=False)
        except UpstreamError as error:
            raise broken(self._client, engine, error, sent) from None
        check_end(self._client, engine, sent)
        context.outcome.count_prompt(*relay.prompt_usage)
        context.outcome.end(sent.finish or "unknown")


def leave_if_failed(answer: EngineResponse, sent: SentTokens) -> None:
    """Give `answer` up if its engine is to be left."""
    if sent.failure is not None:
        answer.failed(UpstreamError(Failure.STATUS, sent.failure))
        answer.close()


def check_end(client: EngineClient, engine: Engine, sent: SentTokens) -> None:
    """Look at a stream that came to its end.

    Raises:
        StreamBroken: its engine is to be left all the same.
    """
    if sent.failure is not None:
        raise broken(client, engine, UpstreamError(Failure.STATUS, sent.failure), sent)


def broken(
    client: EngineClient, engine: Engine, error: UpstreamError, sent: SentTokens
) -> StreamBroken:
    """Count a stream that broke off; returns the error to raise.

    An engine that only cannot go on where another one stopped is not ill.
    """
    if sent.failure is not None and sent.error is None:
        return StreamBroken(f"{engine.address}: {sent.failure}")
    return StreamBroken(str(client.failed(engine, error)))


@dataclass(eq=False, slots=True, kw_only=True)
class Resumption:
    """Serves streams that go on at another engine if theirs dies."""

    pool: EnginePool
    families: Families  # say which engines can name the tokens of a stream
    orchestrator: Orchestrator
    client: EngineClient  # reports engines that break off
    metrics: Metrics  # counts streams that broke off, by how they ended

    def applies(self, request: Request, model: str) -> bool:
        """Whether a stream that answers `request` can outlive its engine."""
        return resumable(request) and any(
            self.families.of(engine).reports_tokens(request)
            for engine in self.pool.engines(Role.DECODE, model)
        )

    async def run(self, context: RequestContext, sent: SentTokens | None = None) -> None:
        """Serve a request for which `applies` is true.

        Args:
            context: the request.
            sent: filled with what was sent, if the caller wants to know it too.
        """
        sent = sent or sent_tokens(context)
        sink = _ResumingSink(self.client, self.metrics, sent, context)
        exchange = context.exchange
        try:
            exchange.write(await self.run_into(context, sink, sent))
        except StreamBroken:
            if sent.error is not None:
                exchange.write(sse.event(sent.error) + sse.DONE_EVENT)
            else:
                exchange.write(sse.error_events(broke_off()))
        exchange.end()

    async def run_into(
        self, context: RequestContext, sink: ResponseSink, sent: SentTokens
    ) -> bytes:
        """Have the answer of `context` given to `sink`, by as many engines as it takes.

        The sink gets the legs of all of them, and raises StreamBroken if one breaks off.

        Returns:
            events that the last engine did not send any more; mostly none.

        Raises:
            StreamBroken: the answer cannot go on; the client has seen part of it.
            ApiError, Refused: no engine can do it; the client has seen nothing of it.
        """
        context.reports_tokens = True
        leg, resumes, outcome = context, 0, context.outcome
        try:
            while (error := await self._run_leg(context, leg, sink)) is not None:
                outcome.fail(str(error))
                if sent.done or sent.finish is not None:
                    return sent.missing_end(_counted_prompt(leg, sent))
                rest = None
                if resumes < MAX_RESUMES and isinstance(error, StreamBroken):
                    rest = _rest_of(leg, sent)
                if rest is None:
                    self.metrics.resumed["given up"] += 1
                    outcome.break_off(str(error))
                    raise StreamBroken(str(error))
                self.metrics.resumed["resumed"] += 1
                leg, resumes = rest, resumes + 1
        finally:
            outcome.count(sent.generated)
            if outcome.reason == "unknown":
                outcome.end(sent.finish or "unknown")
        return b""

    async def _run_leg(
        self, context: RequestContext, leg: RequestContext, sink: ResponseSink
    ) -> Exception | None:
        """Run one leg; returns what went wrong, None if the answer has come to its end."""
        try:
            await self.orchestrator.run(leg, sink)
        except StreamBroken as error:
            return error
        except (ApiError, Refused) as error:
            if leg is context:
                raise
            return error
        finally:
            leg.resources.release()
            if leg is not context:
                context.route.add(leg.route)
        return None


def _rest_of(leg: RequestContext, sent: SentTokens) -> RequestContext | None:
    """The rest of the answer as a request of its own; None if it is over or not certain."""
    request, ids = leg.request, _prompt_ids(leg, sent)
    if not sent.known or ids is None:
        return None
    changes = _limits(request, sent.shown - sent.earlier)
    if changes is None:
        return None
    rest = RequestContext(leg.exchange, leg.request_id, leg.fields, Timing(monotonic()))
    rest.model, rest.alias, rest.reports_tokens, rest.trace = leg.model, leg.alias, True, leg.trace
    new = sent.tokens[sent.earlier : sent.shown]
    prompt = ids[:-1] + b"".join(b",%d" % token for token in new) + b"]"
    if request.kind == "completion":
        changes["prompt"] = prompt
        sent.resume()
    else:
        rest.prompt.tokens = PromptTokens(array("I", orjson.loads(prompt)).tobytes(), prompt)
        sent.resume(prompt)
    rest.request = parse(splice(request.body, request.spans, changes), request.kind, 1)
    return rest


def sent_tokens(context: RequestContext, *, resumes: bool = True) -> SentTokens:
    """What was sent of the answer to a request: nothing yet."""
    request = context.request
    show_ids = request.raw("return_token_ids") == b"true"
    return SentTokens(request.kind, show_ids=show_ids, resumes=resumes)


def _limits(request: Request, sent: int) -> dict[str, bytes | None] | None:
    """The members that bound the rest of an answer; None if nothing is left of it."""
    changes: dict[str, bytes | None] = {}
    if request.max_tokens is not None:
        newer = request.kind == "chat" and request.raw("max_completion_tokens") is not None
        rest = request.max_tokens - sent
        if rest < 1:
            return None
        changes["max_completion_tokens" if newer else "max_tokens"] = b"%d" % rest
    least = request.raw("min_tokens")
    if least is not None:
        changes["min_tokens"] = b"%d" % max(0, int(least) - sent)
    return changes


def _counted_prompt(leg: RequestContext, sent: SentTokens) -> int | None:
    """Tokens of the prompt, if the client asked for usage."""
    options = orjson.loads(leg.request.raw("stream_options") or b"{}")
    ids = _prompt_ids(leg, sent) if options.get("include_usage") else None
    return ids.count(b",") + 1 - sent.earlier if ids is not None else None


def _prompt_ids(leg: RequestContext, sent: SentTokens) -> bytes | None:
    """The token ids of a leg's prompt, as JSON, if the router or an engine knows them."""
    handoff = leg.route.handoff
    if leg.request.ids is not None:
        return leg.request.raw("prompt")
    if leg.prompt.tokens is not None:
        return leg.prompt.tokens.json
    return (handoff.prompt_token_ids if handoff is not None else None) or sent.prompt
