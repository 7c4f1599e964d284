"""`kvrouter ARGUMENTS` that counts and times nothing: what benchmarks/overhead.py compares with.

A router has no flag for that; here what it calls for its metrics does nothing. Two counters that
are incremented in place are left, some 0.1 us of a request.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvrouter._native import StreamFeed
from kvrouter.cli.main import main
from kvrouter.openai.response import MARKS
from kvrouter.serving import settle
from kvrouter.serving.legs import orchestrator
from kvrouter.serving.streaming import relay
from kvrouter.telemetry import metrics


def nothing(*_: Any) -> None:
    """Do nothing."""


class _Deaf:
    """Buckets that hear nothing; what they are called by is native, as in the real ones."""

    counts: Sequence[int] = ()
    sum = 0.0
    observe = staticmethod(bool)

    def __init__(self, bounds: Sequence[Any]) -> None:
        self.counts = [0] * (len(bounds) + 1)


class _Quiet(relay.Relay):
    """A relay whose events nobody times."""

    def __init__(
        self, exchange: Any, answer: Any, _: Any, tidy: Any, *, every: bool = False
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._feed = answer.feed or StreamFeed()
        self._feed.watch(*MARKS)
        self._tidy = tidy
        self._every = every
        self._begun = self._whole = False
        self._held = bytearray()


def silence() -> None:
    """Have this process count nothing."""
    replace(metrics, "Buckets", _Deaf)
    replace(orchestrator, "note_plan", nothing)
    replace(settle.Settler, "take", nothing)
    replace(relay, "Relay", _Quiet)
    from kvrouter.serving.streaming import sinks  # noqa: PLC0415 - it must find the silent relay

    replace(sinks, "Relay", _Quiet)


def replace(module: Any, name: str, by: Callable[..., Any]) -> None:
    """Put `by` in the place of what the router calls; an error where there is no such name."""
    getattr(module, name)
    setattr(module, name, by)


if __name__ == "__main__":
    silence()
    sys.exit(main(sys.argv[1:]))
