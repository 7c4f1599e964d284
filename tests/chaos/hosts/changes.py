"""Members that go and come back: how soon that is seen, and what it costs in hits."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.hosts.hits import SOURCES, HitRates, Source
from tests.chaos.judge import Asked, Fault

BEFORE_S = 6.0
"""For the hit rates before a change, and those at its end."""
LOOK_S = 0.1
"""Between two looks whether something is seen."""
RECOVERED = 0.5
"""Of the hit rate before; less than that at the end is a problem."""


@dataclass
class Change(Fault):
    """A member goes at `at_s` and is back at `returned_s`; all is watched until `until_s`.

    Attributes:
        within_s: how soon others must see that it has gone, and that it is back; the drill looks
            every LOOK_S.
        tier: whether it is the whole tier below the nodes, in which then nothing can be found.
        loses: whether the tier has lost blocks when all is back.
        gone_s, back_s: after how long the last of the others saw it; None if it took too long.
    """

    at_s: float = 0.0
    within_s: tuple[float, float] = (0.0, 0.0)
    tier: bool = False
    loses: bool = False
    returned_s: float = float("inf")
    gone_s: float | None = None
    back_s: float | None = None

    def rates(self, source: Source, rates: HitRates) -> list[float | None]:
        """Hit rates before it, while it was away and others knew, and at its end."""
        gone_s = self.at_s + (self.gone_s or 0.0)
        return [
            rates.rate(source, self.at_s - BEFORE_S, self.at_s),
            rates.rate(source, gone_s, self.returned_s),
            rates.rate(source, self.until_s - BEFORE_S, self.until_s),
        ]


def problems(changes: Iterable[Change], rates: HitRates) -> Iterator[str]:
    """What was seen too late, or cost too much."""
    for change in changes:
        seen = zip(("gone", "back"), (change.gone_s, change.back_s), change.within_s, strict=True)
        for what, seconds, within_s in seen:
            if seconds is None or seconds > within_s + LOOK_S:
                when = "never" if seconds is None else f"after {seconds:.2f} s"
                yield f"{change.name}: seen {what} {when}, not within {within_s:g} s"
        away = change.rates("tier", rates)[1]
        if change.tier and away:
            yield f"{change.name}: {away:.0%} found in a tier that was away"
        for source in SOURCES:
            before, _, after = change.rates(source, rates)
            wanted = 0.0 if change.loses else RECOVERED * (before or 0.0)
            if not after or after < wanted:
                figures = f"{shown(before)} before, {shown(after)} after"
                yield f"{change.name}: found in the {source}: {figures}"


def table(changes: Sequence[Change], asked: Iterable[Asked], rates: HitRates) -> list[str]:
    """One line for each: its requests, when it was seen, and hit rates before, while away, after.

    Hits in the store: of what prefill engines lack. In the tier: of what a node lacks.
    """
    every = list(asked)
    columns = f"{'change':<38} {'from':>6} {'to':>6} {'requests':>9} {'failed':>7} {'slowest':>8}"
    hits = f"{'before':>6} {'away':>4} {'after':>5}"
    lines = [
        f"{'':<{len(columns)}}   {'seen after':^11}   {'in the store':^17}   {'in the tier':^17}",
        f"{columns}   {'gone':>5} {'back':>5}   {hits}   {hits}",
    ]
    for change in changes:
        under = [one for one in every if change.touches(one.begun_s, one.ended_s)]
        failed = sum(one.failed for one in under)
        slowest_s = max((one.ended_s - one.begun_s for one in under), default=0.0)
        seen = (f"{'-' if s is None else f'{s:.2f}':>5}" for s in (change.gone_s, change.back_s))
        found = (change.rates(source, rates) for source in SOURCES)
        shares = (f"{shown(b):>6} {shown(w):>4} {shown(a):>5}" for b, w, a in found)
        lines.append(
            f"{change.name:<38} {change.at_s:>6.1f} {change.until_s:>6.1f} {len(under):>9} "
            f"{failed:>7} {slowest_s:>6.1f} s   {' '.join(seen)}   {'   '.join(shares)}"
        )
    return lines


def shown(rate: float | None) -> str:
    """A rate in a table."""
    return "-" if rate is None else f"{rate:.0%}"
