"""Judges what engines did wrong: counts it as the table of failures says, and makes the error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Engine, Role
from kvrouter.http.client.response import EngineResponse, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.serving.legs.failures import TABLE, Counted, LegFailed, Refused, Words, failure_of
from kvrouter.serving.legs.verdict import GaveUp, words_of

if TYPE_CHECKING:
    from kvrouter.credentials.engine_keys import WorkerKeys
    from kvrouter.engines.pool import EnginePool
    from kvrouter.errors import ApiError
    from kvrouter.http.client.pool import Deadlines
    from kvrouter.telemetry.metrics import Metrics

_NO_RANK: Final = re.compile(rb"(?:data_parallel_rank \d+ is|routed_dp_rank=\d+) out of range")
"""How vLLM and SGLang refuse a rank (input_processor.py; managers/tokenizer_manager.py)."""


@dataclass(eq=False, slots=True, kw_only=True)
class Judge:
    """Reports to the pool how engines did."""

    pool: EnginePool  # counts failures and successes of engines
    deadlines: Deadlines  # of every leg
    metrics: Metrics  # counts failures
    worker_keys: WorkerKeys  # keys that engines get

    def failed(
        self,
        engine: Engine,
        error: UpstreamError,
        leg: Role = Role.DECODE,
        words: Words | None = None,
    ) -> LegFailed:
        """Count a failed leg as `TABLE` says; returns the error to raise."""
        failure, counted = error.failure, TABLE[error.failure].counted
        self.metrics.upstream_errors[leg.value, failure.value] += 1
        if counted in (Counted.YES, Counted.LEAVES):
            self.pool.failed(engine, failure)
        later = counted is Counted.LATER
        prove = partial(self.pool.proven, engine, failure) if later else None
        return LegFailed(engine, failure, str(error), leg, words=words, prove=prove)

    def verdict(
        self,
        engine: Engine,
        error: UpstreamError,
        leg: Role = Role.DECODE,
        words: Words | None = None,
    ) -> LegFailed | Refused | ApiError:
        """As `failed`, unless the engine says in its `words` that the request is to blame."""
        words = error.words if isinstance(error, GaveUp) else words
        if words is None or error.failure is not Failure.REQUEST:
            return self.failed(engine, error, leg, words)
        self.pool.succeeded(engine)
        return words.told(leg)

    async def not_well(
        self, engine: Engine, leg: Role, answer: EngineResponse
    ) -> LegFailed | Refused | ApiError:
        """What to raise for an answer that is no 200."""
        words = await words_of(answer, self.deadlines.idle_s)
        if engine.rank is not None and words.body is not None and _NO_RANK.search(words.body):
            self.pool.leave(engine, "changed")  # fewer ranks than it said: it is detected again
            no_rank = UpstreamError(Failure.ANSWER, "it has no such data-parallel rank")
            return self.failed(engine, no_rank, leg)
        ours = self.worker_keys.judged(engine.server.address, words.status)
        failure = failure_of(words.status, is_json=words.body is not None, ours=ours)
        error = UpstreamError(failure, f"it answers {words.status}")
        return self.verdict(engine, error, leg, words)
