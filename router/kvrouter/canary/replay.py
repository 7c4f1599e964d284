"""Computes samples again, one at a time and on idle engines, and compares the answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.canary.verdict import CanaryOutcome, Difference, first_difference, margin, tokens_of
from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.splice import splice
from kvrouter.http.client.pool import UpstreamError
from kvrouter.openai.request import Request, parse
from kvrouter.serving.legs.failures import LegFailed
from kvrouter.serving.legs.leg import MAX_ANSWER_BYTES, PATHS, EngineClient
from kvrouter.serving.passthrough import forward
from kvrouter.serving.request.headers import with_own_id
from kvrouter.telemetry.series import Tally

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool

MAX_SAMPLES: Final = 32
"""Samples that may wait; further ones are skipped."""
PATIENCE_S: Final = 60.0
"""Longest wait of a sample for an idle moment of its engine."""
LOOK_S: Final = 0.25

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """A request and its answer.

    Attributes:
        request_id: of the client's request.
        request: as it arrived.
        model: as it was resolved.
        engine: of the decode leg.
        prefill: address of the engine of the prefill leg; None without one.
        fields: header lines of its legs.
        prompt_ids: JSON array of the prompt's tokens, if the decode leg got one.
        tokens: ids of the answer.
        at_s: when it ended, on the monotonic clock.
    """

    request_id: str
    request: Request
    model: str
    engine: Engine
    prefill: str | None
    fields: bytes
    prompt_ids: bytes | None
    tokens: tuple[int, ...]
    at_s: float


@dataclass(eq=False)
class CanaryReplays:
    """Has the decode engine of each sample compute the whole answer again, alone.

    A random salt gives the replay's blocks new hashes, so that no cache and no store has them.
    Replays run one at a time. Each begins while no request waits in the router and its engine has
    fewer than `below_requests` requests in flight.

    Attributes:
        outcomes: counts samples by outcome.
    """

    pool: EnginePool  # the engines
    families: Families  # write the body of a replay
    client: EngineClient  # sends replays
    waiting: Callable[[], int]  # counts the requests that wait in the router
    below_requests: int  # see above
    near_tie: float  # difference of log-probabilities up to which either token is right
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
            if engine.requests < self.below_requests and not self.waiting():
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
        if by is not None and by <= self.near_tie:
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
