"""What follows from each failure of a leg: the one table that the legs and docs/failures.md ask.

`python -m kvrouter.tools.docs.failures > docs/failures.md` writes it down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from kvrouter.engines.compatibility import on_other_servers
from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families import FAMILIES
from kvrouter.engines.families.base import LegOrder
from kvrouter.errors import ApiError, speaks_anthropic
from kvrouter.http.bounded_json import bounded
from kvrouter.http.failure import Failure
from kvrouter.http.headers import JSON
from kvrouter.openai.endpoints import RESPONSES
from kvrouter.openai.sse import error_events, last_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvrouter.engines.pool import EnginePool
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.openai.request import Request
    from kvrouter.routing.plan import Plan
    from kvrouter.serving.request.context import RequestContext
MAX_ERRORS: Final = 2
"""Answers 500 to one request that end its tries, as `--retry-max-attempts` does."""


class Counted(StrEnum):
    """Whether a failure counts in the engine's breaker."""

    NO = "no"
    YES = "yes"
    LEAVES = "it leaves the pool"
    LATER = "once another engine does well"


class Answer(NamedTuple):
    """What the client gets if no engine can do it; by default the engine's own status and words."""

    status: int = 0
    message: str = ""  # about a leg
    retry_after_s: int | None = None  # if the engine names none


_OWN: Final = Answer()
_NONE: Final = Answer(503, "No {leg} engine could answer.", retry_after_s=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What follows from one failure."""

    failure: Failure  # the failure, also the `reason` of `kvrouter:upstream_errors_total`
    what: str  # what happened, in a sentence for the docs
    again: bool  # whether another engine is asked while the client has no content
    begun: bool = True  # whether the engine may be at it: what must not be done twice then is not
    counted: Counted  # whether its breaker counts it
    answer: Answer = _OWN  # the client's, if no engine can do it


ROWS: Final = (
    Row(
        failure=Failure.REFUSED,
        what="Nothing listens there, or the engine is being removed.",
        again=True,
        begun=False,
        counted=Counted.LEAVES,
        answer=_NONE,
    ),
    Row(
        failure=Failure.CONNECT,
        what="No connection, by a deadline or for another reason.",
        again=True,
        begun=False,
        counted=Counted.YES,
        answer=_NONE,
    ),
    Row(
        failure=Failure.BROKEN,
        what="The connection broke before the answer was whole.",
        again=True,
        counted=Counted.YES,
        answer=_NONE,
    ),
    Row(
        failure=Failure.DEAD,
        what="The engine was declared dead meanwhile, and has left the pool.",
        again=True,
        begun=False,
        counted=Counted.NO,
        answer=_NONE,
    ),
    Row(
        failure=Failure.TIMEOUT,
        what="A living engine is too slow, or a gateway before it answers 504.",
        again=False,
        counted=Counted.NO,
        answer=Answer(504, "The engine did not answer in time."),
    ),
    Row(
        failure=Failure.FULL,
        what="It answers 429, or 503 in JSON: it has no room.",
        again=True,
        begun=False,
        counted=Counted.NO,
        answer=Answer(retry_after_s=1),
    ),
    Row(
        failure=Failure.ERROR,
        what="It answers 500.",
        again=True,
        counted=Counted.LATER,
    ),
    Row(
        failure=Failure.STATUS,
        what="It answers another 5xx or a redirect, or refuses the router's own key.",
        again=True,
        counted=Counted.YES,
        answer=_NONE,
    ),
    Row(
        failure=Failure.ANSWER,
        what="Its answer is not HTTP, not JSON, not a stream, encoded, or without KV.",
        again=True,
        counted=Counted.YES,
        answer=Answer(502, "The engine's answer cannot be served."),
    ),
    Row(
        failure=Failure.ABORTED,
        what="Its 200 says that it did not work: `finish_reason` is `abort`, `error` or "
        "`cancelled`; or it answers 499.",
        again=True,
        counted=Counted.LATER,
        answer=Answer(502, "The engine gave the request up."),
    ),
    Row(
        failure=Failure.REQUEST,
        what="It refuses the request: 4xx or 501, also told within a 200.",
        again=False,
        counted=Counted.NO,
    ),
    Row(
        failure=Failure.TOO_LARGE,
        what="Its answer must be kept whole and is larger than 64 MiB.",
        again=False,
        counted=Counted.NO,
        answer=Answer(502, "The engine's answer is larger than the router can keep."),
    ),
    Row(
        failure=Failure.LOCAL,
        what="The router has no descriptor, port or memory left for a connection.",
        again=False,
        begun=False,
        counted=Counted.NO,
        answer=Answer(503, "The router cannot open another connection now; try again.", 1),
    ),
)
TABLE: Final[Mapping[Failure, Row]] = MappingProxyType({row.failure: row for row in ROWS})
_NOT_TAKEN: Final = frozenset({Failure.REFUSED, Failure.CONNECT, Failure.LOCAL})
_FORMED: Final = ("tools", "tool_choice", "functions", "function_call", "response_format")


def failure_of(status: int, *, is_json: bool, ours: bool) -> Failure:
    """What an engine's answer other than a 200 means; `ours`: it refuses the router's own key."""
    if ours or status < 400:
        return Failure.STATUS
    if status == 499:  # the client is still here
        return Failure.ABORTED
    if status == 429 or (status == 503 and is_json):
        return Failure.FULL
    if status < 500 or status == 501:
        return Failure.REQUEST
    return {500: Failure.ERROR, 504: Failure.TIMEOUT}.get(status, Failure.STATUS)


def formed(request: Request) -> bool:
    """Whether engines read a form in its answer, which the prefill leg's one token cuts off."""
    return any(request.raw(name) is not None for name in _FORMED)


@dataclass(frozen=True, slots=True)
class Words:
    """What an engine says instead of doing its leg."""

    status: int  # of HTTP
    body: bytes | None  # as it came; None: it cannot be passed on, and `message` stands for it
    content_type: str = JSON  # of the body
    message: str = ""  # a sentence in place of the body; "" for the usual one
    retry_after_s: int | None = None  # when to come again, as the engine says

    def told(self, leg: Role) -> ApiError | Refused:
        """The same as the client's answer."""
        if self.body is not None:
            return Refused(self, leg)
        message = self.message or f"The engine answers {self.status}."
        return ApiError(self.status, message, retry_after_s=self.retry_after_s)


class LegFailed(Exception):
    """An engine did not do its leg.

    `prove` counts what `Counted.LATER` leaves open: for the engine, or for the pair that it is with
    the one from which it was to fetch KV.
    """

    def __init__(
        self,
        engine: Engine,
        failure: Failure,
        message: str,
        leg: Role = Role.DECODE,
        *,
        words: Words | None = None,
        prove: Callable[[Engine | None], object] | None = None,
    ) -> None:
        super().__init__(f"{engine.address}: {message}")
        self.engine = engine
        self.failure = failure
        self.row = TABLE[failure]
        self.leg = leg
        self.words = words
        self.prove = prove

    @property
    def taken(self) -> bool:
        """Whether the engine may have taken what it was handed: it has answered, or begun."""
        return self.failure not in _NOT_TAKEN


class Refused(Exception):
    """An engine's own words are the client's answer: it refused the request, or all failed so."""

    def __init__(self, words: Words, leg: Role) -> None:
        super().__init__(f"refused with {words.status}")
        self.leg = leg
        self.words = words

    def respond(self, exchange: Exchange, fields: bytes) -> None:
        """Answer with it and these header lines."""
        words = self.words
        if words.retry_after_s is not None:
            fields += b"retry-after: %d\r\n" % words.retry_after_s
        kind = words.content_type
        exchange.respond(words.status, words.body or b"", content_type=kind, fields=fields)

    def events(self, path: str = "") -> bytes:
        """What ends a stream to `path` that has begun already, with comments.

        It keeps the engine's own JSON where clients of that endpoint read it in a stream.
        """
        status = self.words.status
        error = ApiError(status, f"The engine answers {status}.")
        try:
            told = orjson.loads(bounded(self.words.body or b""))
            given = told["error"]
            error.message = str(given["message"])
            error.param, error.code = given.get("param"), given.get("code") or status
        except (ValueError, TypeError, KeyError, AttributeError):
            return error_events(error, path)
        foreign = told.get("type") != "error" if speaks_anthropic(path) else path == RESPONSES
        return error_events(error, path) if foreign else last_events(orjson.dumps(told), path)


class Attempts:
    """How the engines of one request failed, one after another, and what the client gets of it.

    A request has one from its first failure on, or from its plan for a pair that has failed lately.
    """

    __slots__ = ("_errors", "_full", "_last", "_unproven", "alone", "sources", "works")

    def __init__(self) -> None:
        # Prefill engines from which its decode engines failed to fetch KV.
        self.sources: list[Engine] = []
        self.alone = False  # whether a decode engine computes the prompt because of that
        self.works: Callable[[], object] | None = None  # notes that the pair of its plan works
        self._last: tuple[Row, Role, Words | None]
        self._full: Words | None = None  # of the last leg
        self._errors = 0
        self._unproven: list[Callable[[], object]] = []

    def failed(self, failed: LegFailed, *, formed: bool, source: Engine | None = None) -> bool:
        """Note a failure; whether another engine may be asked. `formed`, `source`: see there.

        A second 500 is the request's fault: none of these engines is counted for it.
        """
        if failed.failure is Failure.FULL:
            self._full = _sooner(self._full, failed.words)
        elif self._full is not None and failed.leg is not self._last[1]:
            self._full = None
        self._last = failed.row, failed.leg, failed.words
        self._errors += failed.failure is Failure.ERROR
        if failed.prove is not None and not (failed.leg is Role.PREFILL and formed):
            self._unproven.append(partial(failed.prove, source))
        if source is not None:
            self.sources.append(source)
        self.works = None
        return failed.row.again and self._errors < MAX_ERRORS

    def proven(self) -> None:
        """Another engine does well: count those that failed what it can do."""
        works, self.works = self.works, None
        if works is not None:
            works()
        while self._unproven:
            self._unproven.pop()()

    def answer(self) -> ApiError | Refused:
        """What the client gets, if no engine did its part."""
        row, leg, words = self._last
        status, message, retry_after_s = row.answer
        words = None if message else words
        if self._full is not None and row.again and row.failure is not Failure.ERROR:
            words = self._full  # room is what is missing
        if words is not None:
            return words.told(leg)
        return ApiError(status or 500, message.format(leg=leg), retry_after_s=retry_after_s)


class Tried(list[tuple[Engine, int]]):
    """Engines that are not to be asked again for one request, unless they have joined again.

    With each goes its `joins` of the time when it was asked.
    """

    __slots__ = ()

    def others(self, engines: Iterable[Engine]) -> Sequence[Engine]:
        """Those that were not tried; on other servers, if there are some."""
        if not self:
            return list(engines)
        left = [engine for engine in engines if (engine, engine.joins) not in self]
        return on_other_servers(left, (engine for engine, _ in self))


def note(context: RequestContext, failed: LegFailed) -> bool:
    """Note how a leg of a request failed; whether another engine may be asked."""
    context.outcome.fail(str(failed))
    source = source_of(context, failed)
    return _attempts(context).failed(failed, formed=formed(context.request), source=source)


def _attempts(context: RequestContext) -> Attempts:
    if not isinstance(context.attempts, Attempts):
        context.attempts = Attempts()
    return context.attempts


def source_of(context: RequestContext, failed: LegFailed) -> Engine | None:
    """The prefill engine from which a decode leg that gave up was to fetch KV; None: from none."""
    plan, handoff = context.route.plan, context.route.handoff
    if plan is None or failed.leg is Role.PREFILL or failed.row.counted is not Counted.LATER:
        return None
    concurrent = FAMILIES[failed.engine.family].order is LegOrder.CONCURRENT
    handed = handoff is not None and handoff.transfer_params is not None
    return plan.prefill if concurrent or handed else None


def begin_pair(context: RequestContext, pool: EnginePool, plan: Plan) -> None:
    """A plan for a pair that has failed lately is a trial, once its breaker is half open."""
    prefill, decode = plan.prefill, plan.decode
    if prefill is not None and prefill in decode.pairs:
        decode.pairs[prefill].began()
        _attempts(context).works = partial(pool.pairs.worked, prefill, decode)


def other_sources(context: RequestContext, prefill: Sequence[Engine]) -> Sequence[Engine]:
    """Prefill engines for another try: those that did not fail as a source, if there are some."""
    attempts = context.attempts
    if not isinstance(attempts, Attempts) or not attempts.sources:
        return prefill
    return () if attempts.alone else [e for e in prefill if e not in attempts.sources] or prefill


def last_try(context: RequestContext, failed: LegFailed) -> Sequence[Engine]:
    """The decode engine itself, once, if it failed to fetch KV: it can compute the prompt.

    That also tells whether the request is to blame where all pairs fail.
    """
    attempts, able = _attempts(context), failed.engine.identity
    if attempts.alone or able is None or not able.can_serve_whole:
        return ()
    attempts.alone = source_of(context, failed) is not None
    return (failed.engine,) if attempts.alone else ()


def answer_of(context: RequestContext) -> ApiError | Refused:
    """What the client gets if no engine did its part."""
    if isinstance(context.attempts, Attempts):
        return context.attempts.answer()
    return ApiError(503, "No decode engine is available.", retry_after_s=1)


def _sooner(one: Words | None, other: Words | None) -> Words:
    """The later words of an engine without room, with the time of the one that has it sooner."""
    usual = TABLE[Failure.FULL].answer.retry_after_s
    times = [words.retry_after_s or usual for words in (one, other) if words is not None]
    words = other or Words(429, None)
    return replace(
        words,
        message=words.message or "The engines are full.",
        retry_after_s=min(filter(None, times), default=usual),
    )
