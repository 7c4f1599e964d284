"""Samples requests, computes their answers again on idle engines, one at a time, and compares them.

The router asks the engine to name the tokens of a sampled answer; the client does not see them
unless it asked too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from random import random
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.canary.verdict import CanaryOutcome, Difference, first_difference, margin, tokens_of
from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.splice import splice
from kvrouter.http.client.pool import UpstreamError
from kvrouter.openai.request import Request, parse
from kvrouter.openai.response import tidy_events
from kvrouter.serving.legs.failures import LegFailed
from kvrouter.serving.legs.leg import MAX_ANSWER_BYTES, PATHS, EngineClient
from kvrouter.serving.passthrough import forward
from kvrouter.serving.request.context import with_own_id
from kvrouter.serving.streaming.relay import ClientSink, Relay
from kvrouter.serving.streaming.resume import Resumption, comparable, sent_tokens
from kvrouter.telemetry.series import Tally

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrouter.canary.settings import CanarySettings
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.openai.token_events import SentTokens
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics

MAX_SAMPLES: Final = 32  # samples that may wait; further ones are skipped
PATIENCE_S: Final = 60.0  # longest wait of a sample for an idle moment of its engine
LOOK_S: Final = 0.25
ENDED_WELL: Final = frozenset({"stop", "length"})
MAX_BODY_BYTES: Final = 256 << 10
"""Largest body of a sampled request, which is kept until its replay."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """A request and its answer."""

    request_id: str  # of the client's request
    request: Request  # as it arrived
    model: str  # as it was resolved
    engine: Engine  # of the decode leg
    prefill: str | None  # address of the engine of the prefill leg; None without one
    fields: bytes  # header lines of its legs
    prompt_ids: bytes | None  # JSON array of the prompt's tokens, if the decode leg got one
    tokens: tuple[int, ...]  # ids of the answer
    at_s: float  # when it ended, on the monotonic clock


@dataclass(eq=False)
class CanaryReplays:
    """Has the decode engine of each sample compute the whole answer again, alone.

    A random salt gives the replay's blocks new hashes, so that no cache and no store has them.
    Replays run one at a time. Each begins while no request waits in the router and its engine has
    fewer than `canary_below_requests` requests in flight.

    Attributes:
        outcomes: counts samples by outcome.
    """

    pool: EnginePool  # the engines
    families: Families  # write the body of a replay
    client: EngineClient  # sends replays
    waiting: Callable[[], int]  # counts the requests that wait in the router
    settings: CanarySettings
    clock: Callable[[], float] = monotonic  # seconds, monotonic
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep  # sleeps for a number of seconds

    def __post_init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._task: asyncio.Task[None] | None = None
        self.outcomes = Tally(
            "kvrouter:canary",
            "Sampled answers that one engine computed again alone: equal, near tie, diverged (an "
            "alarm), failed, or skipped.",
            ["outcome"],
        )
        # The first one that diverges must be an increase, for the alarm.
        self.outcomes.update({outcome.value: 0 for outcome in CanaryOutcome})

    def offer(self, sample: Sample) -> None:
        """Queue `sample`; it is skipped if too many wait."""
        if len(self._samples) >= MAX_SAMPLES:
            self._count(CanaryOutcome.SKIPPED)
            return
        self._samples.append(sample)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name="canary")

    async def close(self) -> None:
        """Forget the waiting samples, and cancel the running replay. Idempotent."""
        self._samples.clear()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _work(self) -> None:
        while self._samples:
            sample = self._samples.popleft()
            try:
                idle = await self._idle(sample)
                self._count(await self._outcome(sample) if idle else CanaryOutcome.SKIPPED)
            except Exception:  # one sample must not end the canary
                log.exception("canary: the replay of request %s failed", sample.request_id)
                self._count(CanaryOutcome.FAILED)

    async def _idle(self, sample: Sample) -> bool:
        """Wait until its engine is idle enough; False if it is gone, or after PATIENCE_S."""
        engine = sample.engine
        while engine in self.pool.engines(Role.DECODE, sample.model):
            if engine.requests < self.settings.canary_below_requests and not self.waiting():
                return True
            if self.clock() - sample.at_s > PATIENCE_S:
                return False
            await self.pause(LOOK_S)
        return False

    async def _outcome(self, sample: Sample) -> CanaryOutcome:
        answer = await self._ask(sample, sample.request)
        alone = tokens_of(answer) if answer is not None else None
        if alone is None:
            return CanaryOutcome.FAILED
        difference = first_difference(sample.tokens, alone)
        if difference is None:
            return CanaryOutcome.EQUAL
        by = await self._margin(sample, difference)
        if by is not None and by <= self.settings.canary_near_tie:
            return CanaryOutcome.NEAR_TIE
        log.error(
            "canary: an answer differs from what its engine computes alone: request %s, prefill "
            "%s, decode %s, token %d: %s was sent, %s was computed alone, %s",
            sample.request_id,
            sample.prefill,
            sample.engine.address,
            difference.at,
            difference.served,
            difference.alone,
            "which is no near tie" if by is None else f"their log-probabilities differ by {by:.2f}",
        )
        return CanaryOutcome.DIVERGED

    async def _margin(self, sample: Sample, difference: Difference) -> float | None:
        """Difference of the two log-probabilities; None if one answer ended, or it is unknown."""
        if difference.served is None or difference.alone is None:
            return None
        request, count = sample.request, difference.at + 1
        changes: dict[str, bytes | None] = {"max_tokens": b"%d" % count}
        changes["return_tokens_as_token_ids"] = b"true"
        if request.kind == "chat":
            changes |= {"max_completion_tokens": None, "logprobs": b"true", "top_logprobs": b"2"}
        else:
            changes["logprobs"] = b"2"
        least = request.raw("min_tokens")
        if least is not None:
            changes["min_tokens"] = b"%d" % min(int(least), count)
        shorter = parse(splice(request.body, request.spans, changes), request.kind, 1)
        answer = await self._ask(sample, shorter)
        return margin(answer, request.kind, difference) if answer is not None else None

    async def _ask(self, sample: Sample, request: Request) -> bytes | None:
        """The engine's whole answer to `request`; None, with a line in the log, without one."""
        engine, client = sample.engine, self.client
        salt = orjson.dumps(f"canary-{token_hex(16)}")
        family = self.families.of(engine)
        body = family.isolated_body(request, salt=salt, prompt_ids=sample.prompt_ids)
        ticket = self.pool.reserve(engine, request.prompt_tokens + len(sample.tokens))
        try:
            fields = with_own_id(sample.fields)
            answer = await forward(client, engine, (PATHS[request.kind], fields, body))
            content = await answer.read(MAX_ANSWER_BYTES, client.deadlines.idle_s)
        except (LegFailed, UpstreamError) as error:
            log.info("canary: the replay of request %s failed: %s", sample.request_id, error)
            return None
        finally:
            ticket.release()
        if answer.status == 200:
            return content
        log.info(
            "canary: %s refused the replay of request %s with %d: %s",
            engine.address,
            sample.request_id,
            answer.status,
            content[:200].decode("utf-8", "replace"),
        )
        return None

    def _count(self, outcome: CanaryOutcome) -> None:
        self.outcomes[outcome.value] += 1


class SampledSink(ClientSink):
    """A `ClientSink` that gives each event to `sent`, which keeps the tokens."""

    def __init__(self, client: EngineClient, metrics: Metrics, sent: SentTokens) -> None:
        super().__init__(client, metrics)
        self._sent = sent

    def respond(self, context: RequestContext, body: bytes) -> None:
        """Answer, without the tokens' names unless the client asked for them."""
        super().respond(context, self._sent.rewrite_answer(body))

    def relay(self, context: RequestContext, answer: EngineResponse) -> Relay:
        """As `ClientSink.relay`."""
        sent, cached = self._sent, context.route.cached_tokens

        def tidy(events: bytes) -> bytes:
            return tidy_events(sent.rewrite(events), cached)

        exchange, gaps = context.exchange, self.gaps(context)
        return Relay(exchange, answer, gaps, tidy, every=True, content=context.answer_began)


@dataclass(eq=False)
class Canary:
    """Serves sampled requests like all others, and hands their answers over for a replay.

    Attributes:
        pool, families, client, metrics: the router's.
    """

    settings: CanarySettings  # which requests to sample, and when to compute them again
    pool: EnginePool
    families: Families
    client: EngineClient
    metrics: Metrics
    orchestrator: Orchestrator  # takes a prompt through its legs
    resumption: Resumption | None  # serves streams that outlive their engine; None without it
    waiting: Callable[[], int]  # how many requests wait; replays begin only while none does

    def __post_init__(self) -> None:
        self._replays = CanaryReplays(
            self.pool, self.families, self.client, self.waiting, self.settings
        )
        self.metrics.add(self._replays.outcomes)

    def samples(self, request: Request, model: str) -> bool:
        """Whether to sample `request`: drawn, greedy, short, and answered with named tokens."""
        if random() >= self.settings.canary_sample_rate or request.max_tokens is None:
            return False
        tokens = request.prompt_tokens + request.max_tokens
        short = tokens <= self.settings.canary_max_tokens
        short = short and len(request.body) <= MAX_BODY_BYTES
        return short and comparable(request) and self._names_tokens(request, model)

    async def run(self, context: RequestContext) -> None:
        """Serve a request for which `samples` is true."""
        resumption = self.resumption
        if resumption is not None and resumption.applies(context.request, context.model):
            sent = sent_tokens(context)
            await resumption.run(context, sent)
        else:
            sent = sent_tokens(context, resumes=False)
            context.reports_tokens = True
            sink = SampledSink(self.client, self.metrics, sent)
            await self.orchestrator.run(context, sink)
        self._offer(context, sent)

    async def close(self) -> None:
        """Stop the replays. Idempotent."""
        await self._replays.close()

    def _offer(self, context: RequestContext, sent: SentTokens) -> None:
        """Hand over a complete answer of one engine whose tokens are all known."""
        request, engine = context.request, self.pool.target(context.route.decode_engine or "")
        complete = context.outcome.reason in ENDED_WELL and context.route.attempts == 1
        if not complete or not (sent.known and sent.tokens) or engine is None:
            return
        if not self.families.of(engine).can_isolate:
            return
        handoff = context.route.handoff
        self._replays.offer(
            Sample(
                context.request_id,
                request,
                context.model,
                engine,
                context.route.prefill_engine,
                context.fields,
                context.prompt.ids or (handoff.prompt_token_ids if handoff else None),
                tuple(sent.tokens),
                monotonic(),
            )
        )

    def _names_tokens(self, request: Request, model: str) -> bool:
        """Whether some engine names the tokens of its answers, and can answer alone."""
        families = (self.families.of(e) for e in self.pool.engines(Role.DECODE, model))
        return any(each.can_isolate and each.reports_tokens(request) for each in families)
