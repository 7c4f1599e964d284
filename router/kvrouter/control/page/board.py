"""Requests in flight, and where recent answers came from, for the status page.

It holds a request only while it is in flight; that costs the request two updates of a table.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.control.page.model import FlowCard, RequestCard, RequestList
from kvrouter.openai.request import UNREAD

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.serving.request.context import RequestContext

MINUTE_S: Final = 60.0
_MODEL: Final = 200  # characters of a model's name: a client may ask for any
SHOWN_REQUESTS: Final = 50  # listed requests, the oldest; the others are only counted

Pair = tuple[str | None, str]  # prefill engine (None: no prefill leg) and decode engine


@dataclass(eq=False)
class Board:
    """Requests for the status page."""

    clock: Callable[[], float] = monotonic  # seconds, monotonic; the clock of the contexts

    def __post_init__(self) -> None:
        self._number = 0
        # By identity: the ids of requests are the clients' own.
        self._live: dict[int, tuple[int, RequestContext]] = {}
        self._flows: deque[tuple[int, dict[Pair, list[int]]]] = deque()
        self._ended_tokens = self._output_tokens = 0

    def enter(self, context: RequestContext) -> None:
        """Add a request; its owner must call `leave` when it has ended."""
        self._number += 1
        self._live[id(context)] = self._number, context

    def leave(self, context: RequestContext) -> None:
        """Remove a request that has ended."""
        self._live.pop(id(context), None)
        for unit in context.shares or (context,):
            if unit.timing.first_s:
                self._note_flow(unit)
            self._ended_tokens += _tokens(unit)

    def output_tokens(self) -> int:
        """Tokens, or events of streams, that clients got.

        It only grows, though an answer may have fewer tokens than it had events.
        """
        units = (u for _, context in self._live.values() for u in context.shares or (context,))
        tokens = self._ended_tokens + sum(map(_tokens, units))
        self._output_tokens = max(self._output_tokens, tokens)
        return self._output_tokens

    def flows(self) -> list[FlowCard]:
        """Answers that ended within the last minute, by their engines."""
        self._forget_flows()
        sums: dict[Pair, list[int]] = {}
        for _, pairs in self._flows:
            for pair, (requests, tokens) in pairs.items():
                total = sums.setdefault(pair, [0, 0])
                total[0] += requests
                total[1] += tokens
        return [
            FlowCard(prefill, decode, requests, tokens)
            for (prefill, decode), (requests, tokens) in sums.items()
        ]

    def requests(self) -> RequestList:
        """The oldest requests in flight."""
        now_s = self.clock()
        oldest = islice(self._live.values(), SHOWN_REQUESTS)
        cards = [_card(number, context, now_s) for number, context in oldest]
        waits = (now_s - c.timing.started_s for _, c in self._live.values() if c.queued)
        return RequestList(len(self._live), next(waits, None), cards)

    def _note_flow(self, unit: RequestContext) -> None:
        second = int(self.clock())
        if not self._flows or self._flows[-1][0] != second:
            self._forget_flows()
            self._flows.append((second, {}))
        route = unit.route
        prefill = _server(route.prefill_engine) if route.handoff else None
        pair = prefill, _server(route.decode_engine) or ""
        counts = self._flows[-1][1].setdefault(pair, [0, 0])
        counts[0] += 1
        counts[1] += unit.request.prompt_tokens

    def _forget_flows(self) -> None:
        since = int(self.clock() - MINUTE_S)
        while self._flows and self._flows[0][0] < since:
            self._flows.popleft()


def _server(target: str | None) -> str | None:
    """The server of an engine or of one of its data-parallel ranks."""
    return target.partition("@")[0] if target is not None else None


def _card(number: int, context: RequestContext, now_s: float) -> RequestCard:
    request = context.request
    units = context.shares or [context]
    last = units[-1]  # with several prompts the last one is the slowest
    return RequestCard(
        key=number,
        id=context.request_id,
        model=(request.model or "")[:_MODEL],
        phase=phase(last),
        prefill=last.route.prefill_engine,
        decode=last.route.decode_engine,
        age_s=round(now_s - context.timing.started_s, 3),
        prompt_tokens=request.prompt_tokens if request is not UNREAD else None,
        tokens=sum(_tokens(unit) for unit in units),
    )


def _tokens(unit: RequestContext) -> int:
    """Tokens of one answer that the client got so far."""
    return unit.outcome.generated or (unit.stream.events if unit.stream is not None else 0)


def phase(context: RequestContext) -> str:
    """The phase of a request, as in `RequestCard`."""
    if context.timing.first_s:
        return "stream"
    if context.route.decode_engine is not None:
        return "decode"
    if context.route.handoff is not None:
        return "landing"
    if context.route.prefill_engine is not None:
        return "prefill"
    return "queue" if context.queued else "plan"
