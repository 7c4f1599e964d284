"""One request on its way through the router: what is known of it and what it holds.

Bookkeeping: it sends nothing and waits for nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import count
from operator import attrgetter
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.landing import Outcome
from kvrouter.route_lines import route_lines

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping

    from kvrouter.budget import Grant
    from kvrouter.engine import Engine, HashDomain
    from kvrouter.families.base import Handoff
    from kvrouter.http.exchange import Exchange
    from kvrouter.landing import Held, Landing
    from kvrouter.openai import Request
    from kvrouter.outlet import Outlet
    from kvrouter.places import Places
    from kvrouter.plan import Plan
    from kvrouter.tokens import Tokens
    from kvrouter.tracing.trace import Attributes, Span, Trace

TRACED: Final = ("traceparent", "tracestate")
FORWARDED: Final = (
    "authorization",
    *TRACED,
    "baggage",
    "x-session-id",
    "x-data-parallel-rank",
)
"""Headers of the client that both legs carry, besides the request's id."""
_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIds:
    """Mints ids that no other router mints."""

    def __init__(self) -> None:
        self._prefix = token_hex(8)
        self._numbers = count(1)

    def of(self, headers: Mapping[str, str]) -> str:
        """The client's own `x-request-id` if it is sane, else a new one."""
        given = headers.get("x-request-id")
        if given is not None and _SANE_ID.fullmatch(given):
            return given
        return f"{self._prefix}-{next(self._numbers):x}"


@dataclass(slots=True)
class Watched:
    """A landing that is awaited while the prefill leg is under way.

    Attributes:
        manifest: hex digest of the manifest.
        blocks: leading blocks of the prompt that are awaited.
        task: the wait; its owner cancels it.
    """

    manifest: str
    blocks: int
    task: asyncio.Task[Landing]

    @property
    def landed(self) -> bool:
        """Whether all that is awaited is in the store."""
        task = self.task
        if not task.done() or task.cancelled() or task.exception() is not None:
            return False
        return task.result().outcome is Outcome.LANDED


class Tap(Protocol):
    """What a stream goes through on its way to the client."""

    @property
    def events(self) -> int:
        """Server-sent events so far."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """KV that a prefill engine keeps for one decode engine.

    Attributes:
        params: raw JSON of the `kv_transfer_params` that fetch it.
        until_s: when it may be gone, on the monotonic clock.
    """

    params: bytes
    until_s: float


@dataclass(slots=True)
class Passage:
    """What is known of one request, and what it holds until it is settled.

    Attributes:
        exchange: the client's request, and the way to it.
        outlet: where the decode leg's answer goes.
        request_id: as in the header of both legs and of the answer.
        fields: header lines that both legs carry.
        hashable: whether block hashes follow from token ids (and salt and adapter) alone.
        adapter: name and path of the LoRA adapter that its model is.
        hashes: its chain of 32-byte block hashes, once somebody needed it.
        stored: leading blocks that the store held, by manifest, if it was asked.
        places: where its legs are counted as load, from its plan on.
        watch: the landing that is awaited, where the decode leg was sent ahead of it.
        tells_route: whether the client is told where it ran.
        started_s: its arrival, on the monotonic clock; the other times are on it too.
        waited_s: seconds that it waited for its turn, and for engines before its plan.
        tokenising_s: seconds until its tokens were known, of text that somebody needed hashes of.
        planned_s: when it was planned; 0: not yet. So are the others.
        prefilled_s: when the last prefill leg ended, well or not.
        landed_s: when the wait for its KV ended.
        first_s: when the first byte of its answer came.
        hit_engine: tokens of its prompt that the decode engine held when it was planned.
        hit_store: tokens beyond these that the store held.
        pinned: what a prefill engine keeps for a decode engine that has not answered yet.
        attempts: decode engines that were asked.
        outcome: a word for metrics and the log: a finish reason, or why there is none.
        shares: the passages of its parts, where it is served in several.
        names_tokens: whether the decode engine is to name the tokens of a stream's events.
        trace: what is noted of it, where it is traced.
        queued: whether it waits for its turn.
        tap: what its answer streams through.
    """

    exchange: Exchange
    outlet: Outlet
    request_id: str
    fields: bytes
    started_s: float
    request: Request | None = None
    tokens: Tokens | None = None
    domain: HashDomain | None = None
    hashable: bool = False
    adapter: tuple[str, str] | None = None
    hashes: bytes | None = None
    stored: Mapping[str, int] | None = None
    plan: Plan | None = None
    places: Places | None = None
    handoff: Handoff | None = None
    watch: Watched | None = None
    landed_blocks: int | None = None
    pinned: Pinned | None = None
    lease: Held | None = None
    grant: Grant | None = None
    prefill_engine: str | None = None
    decode_engine: str | None = None
    attempts: int = 0
    tells_route: bool = False
    waited_s: float = 0.0
    tokenising_s: float = 0.0
    planned_s: float = 0.0
    prefilled_s: float = 0.0
    landed_s: float = 0.0
    first_s: float = 0.0
    hit_engine: int = 0
    hit_store: int = 0
    generated: int = 0
    outcome: str = "unknown"
    error: str | None = None
    shares: list[Passage] | None = None
    names_tokens: bool = False
    trace: Trace | None = None
    queued: bool = False
    tap: Tap | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the prefill engine found cached; None where it was not asked."""
        return self.handoff.cached_tokens if self.handoff is not None else None

    @property
    def prompt_ids(self) -> bytes | None:
        """Token ids, as JSON, that both legs get in place of a text prompt."""
        return self.tokens.json if self.tokens is not None else None

    @property
    def provided(self) -> bool:
        """Whether the decode engine needs nothing any more: it answers, or all has landed."""
        return bool(self.first_s) or (self.watch is not None and self.watch.landed)

    @property
    def answer_fields(self) -> bytes:
        """Header lines of the answer: the request's id and, by option, where it ran."""
        line = b"x-request-id: %b\r\n" % self.request_id.encode("latin-1")
        return line + route_lines(self) if self.tells_route else line

    def waited(self, since_s: float, reason: str) -> None:
        """It has waited since then, for its turn or for an engine."""
        now_s = monotonic()
        self.waited_s += now_s - since_s
        if self.trace is not None:
            self.trace.note("kvrouter.queue", since_s, now_s, {"kvrouter.reason": reason})

    def tokenised(self, since_s: float) -> None:
        """Its tokens were asked for then and are known now, or cannot be."""
        now_s = monotonic()
        self.tokenising_s = now_s - since_s
        if self.trace is not None:
            tokens = len(self.tokens) if self.tokens is not None else 0
            self.trace.note("kvrouter.tokenise", since_s, now_s, {"kvrouter.tokens": tokens})

    def landed(self, since_s: float, landing: Landing) -> None:
        """The wait for its KV, since then, has ended."""
        self.landed_s = monotonic()
        if self.trace is not None:
            outcome, blocks = str(landing.outcome), landing.blocks
            found: Attributes = {"kvrouter.outcome": outcome, "kvrouter.blocks": blocks}
            self.trace.note("kvrouter.landing", since_s, self.landed_s, found)

    def leg(self, name: str, engine: Engine) -> tuple[Span | None, bytes]:
        """A leg begins: its span, where the request is traced, and the header lines it carries."""
        if self.trace is None:
            return None, self.fields
        span = self.trace.leg(name, engine)
        return span, self.fields + self.trace.lines(span)

    def end_decode(self, span: Span) -> None:
        """A decode leg is over: its span tells when its first byte came, where one did."""
        if self.first_s:
            span.attributes["kvrouter.first_byte_ms"] = (self.first_s - span.begun_s) * 1000
        span.end()
        if self.outcome == "broken":
            span.error = span.error or self.error

    def began(self, now_s: float) -> None:
        """The answer's first byte came: its prompt is in the engine, no KV needs holding."""
        self.first_s = now_s
        if self.places is not None:
            self.places.computed()
        self.release()

    def sum_up(self) -> None:
        """The shares have ended: give back what they hold, put together what became of them."""
        shares = self.shares or []
        plans = [share.plan for share in shares if share.plan is not None]
        if plans:
            self.plan = replace(plans[0], why=_joined(plan.why for plan in plans) or "")
        self.prefill_engine = _joined(share.prefill_engine for share in shares)
        self.decode_engine = _joined(share.decode_engine for share in shares)
        self.attempts = sum(share.attempts for share in shares)
        self.generated = sum(share.generated for share in shares)
        self._take_times(shares)
        self.error = self.error or _joined(share.error for share in shares)
        landed = [share.landed_blocks for share in shares if share.landed_blocks is not None]
        self.landed_blocks = sum(landed) if landed else None
        if self.outcome == "unknown" and shares:
            self.outcome = shares[-1].outcome
        for share in shares:
            share.release()

    def _take_times(self, shares: list[Passage]) -> None:
        """The times are those of the share that was answered first; hits are those of all."""
        began = [share for share in shares if share.first_s]
        if began:
            first = min(began, key=attrgetter("first_s"))
            self.waited_s, self.tokenising_s = first.waited_s, first.tokenising_s
            self.planned_s, self.prefilled_s = first.planned_s, first.prefilled_s
            self.landed_s, self.first_s = first.landed_s, first.first_s
        self.hit_engine = sum(share.hit_engine for share in shares)
        self.hit_store = sum(share.hit_store for share in shares)

    def release(self) -> None:
        """Give back lease and grant. Idempotent."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        grant, self.grant = self.grant, None
        if grant is not None:
            grant.release()


def _joined(words: Iterable[str | None]) -> str | None:
    """The different ones of `words`, in their order."""
    return ",".join(dict.fromkeys(word for word in words if word)) or None


def leg_fields(request_id: str, headers: Mapping[str, str], context: bytes | None = None) -> bytes:
    """Header lines for both legs of a request. The parser has refused line breaks in values.

    Args:
        request_id: as in the line `x-request-id`.
        headers: the client's.
        context: lines of the trace context, where that is not the client's to say.
    """
    lines = f"content-type: application/json\r\nx-request-id: {request_id}\r\n"
    for name in FORWARDED:
        if name in headers and (context is None or name not in TRACED):
            lines += f"{name}: {headers[name]}\r\n"
    return lines.encode("latin-1") + (context or b"")
