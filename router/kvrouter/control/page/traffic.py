"""Requests by model, for the status page: of a bounded number of models."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final

from kvrouter.control.page.model import ModelCard
from kvrouter.control.page.window import Growth

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrouter.engines.engine import Engine

MOST: Final = 50
"""Models that are told apart; all others are `OTHER`."""
OTHER: Final = "other"


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
