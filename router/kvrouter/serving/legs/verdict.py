"""Reads what an engine says instead of an answer, also within a 200 that did not work.

SGLang ends a request that it gave up with `finish_reason` "abort", and within a stream with an
error event (entrypoints/openai/serving_completions.py, managers/tokenizer_manager.py
`_handle_abort_finish_reason`); vLLM with "abort" or "error" (v1/engine/__init__.py), TensorRT-LLM
with "cancelled" (executor/result.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.engines.engine import Engine, Role
from kvrouter.errors import ApiError
from kvrouter.http.bounded_json import bounded
from kvrouter.http.client.response import EngineResponse, UpstreamError
from kvrouter.http.failure import Failure
from kvrouter.http.headers import JSON
from kvrouter.openai.response import is_json
from kvrouter.openai.token_events import GIVEN_UP
from kvrouter.serving.legs.failures import TABLE, Counted, LegFailed, Refused, Words, failure_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.credentials.engine_keys import WorkerKeys
    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.client.pool import Deadlines
    from kvrouter.telemetry.metrics import Metrics

MAX_ERROR_BYTES: Final = 8 << 20
"""Of an engine's words that are passed on. vLLM and FastAPI repeat a wrong body in them."""
LONGEST_RETRY_S: Final = 3600
_REFUSED: Final = frozenset({*range(400, 500), 501})
_EVENT_BYTES: Final = 64 << 10
_RESULTS: Final = frozenset({"choices", "data", "output", "results", "content", "status"})
_WORDS: Final = "|".join(sorted(GIVEN_UP)).encode()
_REASON: Final = re.compile(
    rb'"finish_reason":\s*(?:"(?:%b)"|(\{[^{}]*"type":\s*"(?:%b)"[^{}]*\}))' % (_WORDS, _WORDS)
)
_DATA: Final = re.compile(rb"(?:^|[\r\n])(?:\xef\xbb\xbf)?data:([^\r\n]*)")
_MESSAGE: Final = re.compile(rb'"(?:message|error|detail)":\s*"((?:[^"\\]|\\.){1,1000})')
_NO_RANK: Final = re.compile(rb"(?:data_parallel_rank \d+ is|routed_dp_rank=\d+) out of range")
"""How vLLM and SGLang refuse a rank (input_processor.py; managers/tokenizer_manager.py)."""


class GaveUp(UpstreamError):
    """An engine's 200 says that it did not work, in `words` where it has some."""

    def __init__(self, failure: Failure, message: str, words: Words | None = None) -> None:
        super().__init__(failure, message)
        self.words = words


async def words_of(answer: EngineResponse, deadline_s: float) -> Words:
    """What an answer other than a 200 says; its status is certain, whatever becomes of its body."""
    retry_after_s = _seconds(answer.header(b"retry-after"))
    content_type = answer.header(b"content-type") or JSON
    try:
        body = await answer.read(MAX_ERROR_BYTES, deadline_s)
    except UpstreamError:
        told = _excerpt(answer.beginning(_EVENT_BYTES))
        return Words(answer.status, None, message=told, retry_after_s=retry_after_s)
    if answer.coding is not None or not (answer.status in _REFUSED or is_json(body)):
        return Words(answer.status, None, retry_after_s=retry_after_s)
    return Words(answer.status, body or None, content_type, retry_after_s=retry_after_s)


def look(data: bytes) -> None:
    """Look closer at a body, or at the beginning of a stream, perhaps in chunk frames.

    Raises:
        GaveUp: it says that it did not work.
    """
    if not data.startswith((b"{", b"[")):
        found = _DATA.search(data)
        data = found[1].strip() if found is not None else b""
    found = _REASON.search(data)
    if found is not None:
        raise _given_up(found[1])
    if b'"choices"' in data:
        return  # text or token ids, but no error
    try:
        answer = orjson.loads(bounded(data))
    except ValueError:
        return
    code = _code(answer) if isinstance(answer, dict) else None
    if code is not None:
        words = Words(code, data)
        failure = failure_of(code, is_json=True, ours=False)
        raise GaveUp(failure, f"its answer is an error ({code})", words)


def _given_up(reason: bytes | None) -> GaveUp:
    """What a finish reason means, which is a word or an object with more."""
    message = "it gave the request up"
    try:
        told: Mapping[str, Any] = orjson.loads(reason or b"{}")
    except ValueError:
        told = {}
    code, said = told.get("status_code"), told.get("message")
    if not isinstance(code, int) or not 400 <= code < 600:
        return GaveUp(Failure.ABORTED, message)
    error = ApiError(code, said[:1000] if isinstance(said, str) else "The engine gave it up.")
    failure = failure_of(code, is_json=True, ours=False)
    return GaveUp(failure, message, Words(code, error.body()))


def _code(answer: dict[str, Any]) -> int | None:
    """The status of an answer that is an error, as vLLM, SGLang and TensorRT-LLM write one."""
    error = answer if answer.get("object") == "error" else answer.get("error")
    if not error or (error is not answer and _RESULTS & answer.keys()):
        return None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _excerpt(beginning: bytes) -> str:
    """The message in the beginning of a long error; "" if there is none."""
    found = _MESSAGE.search(beginning)
    return found[1].decode("utf-8", "replace") + "..." if found is not None else ""


def _seconds(retry_after: str | None) -> int | None:
    """Whole seconds of a `Retry-After`, within an hour; None: it gives no number."""
    try:
        return max(1, min(LONGEST_RETRY_S, ceil(float(retry_after or ""))))
    except (ValueError, OverflowError):
        return None


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
