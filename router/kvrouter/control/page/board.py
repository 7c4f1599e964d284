"""Requests in flight, and recent answers, for the status page.

It holds a request only while it is in flight; that costs the request two updates of a table.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import astuple, dataclass
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.control.page.model import FlowCard, ModelCard, RequestCard, RequestList
from kvrouter.control.page.window import MINUTE_S, Growth, Recent
from kvrouter.openai.request import UNREAD
from kvrouter.serving.request.summary import parts_of
from kvrouter.telemetry.metrics import NOT_WELL, PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvrouter.engines.engine import Engine
    from kvrouter.serving.request.context import RequestContext

MOST: Final = 50
"""Models that are told apart; all others are `OTHER`."""
OTHER: Final = "other"
_MODEL: Final = 200
"""Characters of a model's name: a client may ask for any."""
SHOWN_REQUESTS: Final = 50
"""Listed requests, the oldest; the others are only counted."""

_NOT_SENT: Final = ("queue", "plan")
"""Phases of a request that no engine has."""

Pair = tuple[str | None, str]
"""Prefill engine (None: no prefill leg) and decode engine."""


@dataclass(slots=True)
class Totals:
    """Counts of one model since the start; they only grow."""

    ok: int = 0  # requests that ended well
    failed: int = 0
    tokens: int = 0  # that clients got
    begun: int = 0  # answers
    ttft_s: float = 0.0  # the sum of their times to the first byte


@dataclass(slots=True)
class Traffic:
    """One model: its totals, and what of it was in flight when `Board` looked last."""

    totals: Totals
    ended_tokens: int = 0  # of requests that have ended
    live_tokens: int = 0
    running: int = 0
    waiting: int = 0  # of these: not sent to an engine yet

    def add_up(self) -> None:
        """Count the tokens so far. An answer may have fewer tokens than it had events."""
        self.totals.tokens = max(self.totals.tokens, self.ended_tokens + self.live_tokens)


class ModelTraffic:
    """The traffic of each model."""

    def __init__(self) -> None:
        self._models: dict[str, Traffic] = {}
        self._growth: Growth[tuple[str, int]] = Growth()

    def all(self) -> Iterator[Traffic]:
        """Of every model."""
        yield from self._models.values()

    def of(self, model: str, asked: str | None = None) -> Traffic:
        """That of `model`; as long as it is "", that of the model which the client `asked` for."""
        traffic = self._models.get(model or asked or OTHER)
        if traffic is None:
            name = model if model and len(self._models) < MOST else OTHER
            traffic = self._models.setdefault(name, Traffic(Totals()))
        return traffic

    def note(self, now_s: float, served: Sequence[str]) -> None:
        """Record the totals at `now_s`; forget models that are gone if there are too many."""
        for name in served[:MOST]:
            self.of(name)
        self._growth.note(
            now_s,
            {
                (name, place): value
                for name, one in self._models.items()
                for place, value in enumerate(astuple(one.totals))
            },
        )
        if len(self._models) >= MOST:
            kept = {*served, *(name for name in self._models if self._busy(name))}
            self._models = {name: one for name, one in self._models.items() if name in kept}

    def cards(self, engines: Sequence[Engine]) -> list[ModelCard]:
        """The models that engines of the pool serve, and those with requests."""
        up = Counter(model for e in engines if e.identity for model in e.identity.models)
        shown = (name for name in self._models if up[name] or self._busy(name))
        return [self._card(name, up[name]) for name in shown]

    def _card(self, name: str, engines: int) -> ModelCard:
        one = self._models[name]
        ok, failed, tokens, begun, ttft_s = self._grown(name)
        return ModelCard(
            name=name,
            engines=engines,
            running=one.running,
            waiting=one.waiting,
            ok=int(ok),
            failed=int(failed),
            output_tokens=int(tokens),
            ttft_mean_s=ttft_s / begun if begun else None,
        )

    def _busy(self, name: str) -> bool:
        return bool(self._models[name].running) or any(self._grown(name))

    def _grown(self, name: str) -> list[float]:
        """The growth of each of `Totals` within the last minute."""
        return [self._growth.of((name, place)) for place in range(5)]


class Board:
    """Requests for the status page.

    Args:
        clock: seconds, monotonic; the clock of the contexts.

    Attributes:
        ttft: times to the first byte within the last minute, in seconds; waits: what of these
            was the wait for a turn or an engine.
        models: the traffic of each model.
        output_tokens: tokens, or events of streams, that clients got until the last `update`; only
            grows.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._number = 0
        # By identity: the ids of requests are the clients' own.
        self._live: dict[int, tuple[int, RequestContext]] = {}
        self._noted: set[int] = set()
        self._flows: deque[tuple[int, dict[Pair, list[int]]]] = deque()
        self._begun = 0
        self._parts_s = [0.0] * len(PARTS)
        self.ttft = Recent(clock)
        self.waits = Recent(clock)
        self.models = ModelTraffic()
        self.output_tokens = 0
        self._ended_tokens = 0

    def enter(self, context: RequestContext) -> None:
        """Add a request; its owner must call `leave` when it has ended."""
        self._number += 1
        self._live[id(context)] = self._number, context

    def leave(self, context: RequestContext) -> None:
        """Remove a request that has ended."""
        self._live.pop(id(context), None)
        traffic = self._traffic(context)
        well = context.status == 200 and context.outcome.reason not in NOT_WELL
        traffic.totals.ok += well
        traffic.totals.failed += not well
        for unit in context.shares or (context,):
            if unit.timing.first_s and id(unit) not in self._noted:
                self._note(unit, traffic)
            self._noted.discard(id(unit))
            tokens = _tokens(unit)
            traffic.ended_tokens += tokens
            self._ended_tokens += tokens

    def update(self) -> None:
        """Record the answers that have begun; must be called about once per second."""
        for traffic in self.models.all():
            traffic.live_tokens = 0
        for _, context in self._live.values():
            for unit in context.shares or (context,):
                if not unit.timing.first_s:
                    continue
                traffic = self._traffic(context)
                traffic.live_tokens += _tokens(unit)
                if id(unit) not in self._noted:
                    self._noted.add(id(unit))
                    self._note(unit, traffic)
        tokens = self._ended_tokens
        for traffic in self.models.all():
            traffic.add_up()
            tokens += traffic.live_tokens
        self.output_tokens = max(self.output_tokens, tokens)

    def count_live(self) -> None:
        """Count the requests of each model that are in flight, and those that wait."""
        for traffic in self.models.all():
            traffic.running = traffic.waiting = 0
        for _, context in self._live.values():
            traffic = self._traffic(context)
            traffic.running += 1
            units = context.shares or [context]
            traffic.waiting += phase(units[-1]) in _NOT_SENT

    def take_parts(self) -> tuple[int, list[float]]:
        """Answers that began since the last call, and the sum of each part of their TTFT in s."""
        taken = self._begun, self._parts_s
        self._begun, self._parts_s = 0, [0.0] * len(PARTS)
        return taken

    def flows(self) -> list[FlowCard]:
        """Answers that began within the last minute, by their engines."""
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
        now_s = self._clock()
        oldest = islice(self._live.values(), SHOWN_REQUESTS)
        cards = [_card(number, context, now_s) for number, context in oldest]
        waits = (now_s - c.timing.started_s for _, c in self._live.values() if c.queued)
        return RequestList(len(self._live), next(waits, None), cards)

    def _traffic(self, context: RequestContext) -> Traffic:
        return self.models.of(context.model, context.request.model)

    def _note(self, unit: RequestContext, traffic: Traffic) -> None:
        """Record the beginning of one prompt's answer."""
        self._begun += 1
        ttft_s = unit.timing.first_s - unit.timing.started_s
        traffic.totals.begun += 1
        traffic.totals.ttft_s += ttft_s
        self.ttft.add(ttft_s)
        parts = parts_of(unit.timing, unit.timing.first_s)
        self.waits.add(parts[0])
        for place, part_s in enumerate(parts):
            self._parts_s[place] += part_s
        second = int(self._clock())
        if not self._flows or self._flows[-1][0] != second:
            self._forget_flows()
            self._flows.append((second, {}))
        pair = (
            _server(unit.route.prefill_engine) if unit.route.handoff else None,
            _server(unit.route.decode_engine),
        )
        counts = self._flows[-1][1].setdefault((pair[0], pair[1] or ""), [0, 0])
        counts[0] += 1
        counts[1] += unit.request.prompt_tokens

    def _forget_flows(self) -> None:
        since = int(self._clock() - MINUTE_S)
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
