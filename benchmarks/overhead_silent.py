"""`kvrouter ARGUMENTS` that counts and times nothing, for benchmarks/overhead.py.

A router has no flag for that: this replaces the functions that it calls for its metrics. Two
counters that it increments in place remain, about 0.1 us of a request.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvrouter.cli.main import main
from kvrouter.openai.response import MARKS
from kvrouter.openai.sse import EventBuffer
from kvrouter.serving import settle
from kvrouter.serving.legs import orchestrator
from kvrouter.serving.streaming import relay
from kvrouter.telemetry import series


def nothing(*_: Any) -> None:
    """Do nothing."""


class _NoBuckets:
    """Buckets that count nothing; their methods are native, as those of the real ones."""

    counts: Sequence[int] = ()
    sum = 0.0
    observe = staticmethod(bool)

    def __init__(self, bounds: Sequence[Any]) -> None:
        self.counts = [0] * (len(bounds) + 1)


class _UntimedRelay(relay.Relay):
    """A relay that does not time events."""

    def __init__(
        self,
        exchange: Any,
        answer: Any,
        _: Any,
        tidy: Any,
        *,
        every: bool = False,
        content: Any = nothing,
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._feed = answer.feed
        self._feed.watch(*MARKS)
        self._tidy = tidy
        self._every = every
        self._begun = self._whole = self._split = False
        self._buffer = EventBuffer()
        self._content = None
        content()


def silence() -> None:
    """Replace all that counts in this process."""
    replace(series, "Buckets", _NoBuckets)
    replace(orchestrator, "note_plan", nothing)
    replace(settle.Settler, "take", nothing)
    replace(relay, "Relay", _UntimedRelay)


def replace(module: Any, name: str, by: Callable[..., Any]) -> None:
    """Replace a function that the router calls by `by`; an error if there is none of that name."""
    getattr(module, name)
    setattr(module, name, by)


if __name__ == "__main__":
    silence()
    sys.exit(main(sys.argv[1:]))
