"""From times to figures: medians, paired ratios with 90 % intervals, and the bars.

A bar is missed if the whole interval lies beyond it, and open if only the median does.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from statistics import median
from typing import Any

from benchmarks.connectors.peers import LMCACHE, MOONCAKE, NIXL

CONFIDENCE = 0.9

OURS, NONE, FLOOR = "kvrouter", "no connector", "own cache"

Times = dict[str, dict[str, list[float]]]  # part, set-up -> seconds; the same index is one pair


@dataclass(frozen=True)
class Ratio:
    """The median of pairs, and its interval."""

    median: float
    low: float
    high: float


def ratio(one: Sequence[float], two: Sequence[float]) -> Ratio:
    """The median of pairs, and its interval with CONFIDENCE by order statistics."""
    found = sorted(b / a for a, b in zip(one, two, strict=True))
    count, skip = len(found), 0
    outside = 1 / 2**count  # the chance that the median lies below the first
    while 1 - 2 * (outside + comb(count, skip + 1) / 2**count) >= CONFIDENCE:
        skip += 1
        outside += comb(count, skip) / 2**count
    return Ratio(median(found), found[skip], found[-1 - skip])


@dataclass(frozen=True)
class Bar:
    """In one part, ours may take at most `limit` times what `peer` takes."""

    part: str
    peer: str
    limit: float

    @property
    def name(self) -> str:
        """What is compared, and the limit."""
        return f"{self.part}: {OURS} <= {self.limit}x {self.peer}"


BARS = (
    Bar("hit", LMCACHE, 1.0),
    Bar("hit", MOONCAKE, 1.0),
    Bar("no hit", NONE, 1.02),
    Bar("cold P/D", NIXL, 1.15),
)


def spread(seconds: Sequence[float]) -> Ratio:
    """The median of times and its interval."""
    return ratio([1.0] * len(seconds), seconds)


def figures(times: Times) -> dict[str, dict[str, dict[str, Any]]]:
    """For each part and set-up: `ttft_s`, and for others than ours `ours_to_it`, of pairs."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for part, setups in times.items():
        found[part] = {name: {"ttft_s": asdict(spread(s))} for name, s in setups.items()}
        for name, seconds in setups.items():
            if name != OURS and OURS in setups:
                found[part][name]["ours_to_it"] = asdict(ratio(seconds, setups[OURS]))
    return found


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The figures in Markdown."""
    lines = ["| part | set-up | TTFT, ms | ours to it |", "|---|---|---|---|"]
    for part, setups in found.items():
        for name, row in setups.items():
            ttft = _cell(row["ttft_s"], 1000, ".1f")
            other = _cell(row["ours_to_it"], 1, ".3f") if "ours_to_it" in row else ""
            lines.append(f"| {part} | {name} | {ttft} | {other} |")
    return "\n".join(lines)


def _cell(value: dict[str, float], scale: float, how: str) -> str:
    middle, low, high = (format(value[key] * scale, how) for key in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def verdict(bar: Bar, found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """`met`, `open`, `MISSED`, or `skipped` if a side was not measured."""
    row = found.get(bar.part, {}).get(bar.peer, {}).get("ours_to_it")
    if row is None:
        return "skipped"
    if row["median"] <= bar.limit:
        return "met"
    return "MISSED" if row["low"] > bar.limit else "open"


def bar_lines(verdicts: dict[str, str], skipped: dict[str, str]) -> list[str]:
    """A line for each bar, and one for each peer that did not run, with its reason."""
    lines = [f"{verdicts[bar.name]:8}{bar.name}" for bar in BARS]
    return lines + [f"skipped {name}: {reason}" for name, reason in skipped.items()]
