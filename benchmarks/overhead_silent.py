"""`kvrouter ARGUMENTS` that counts and times nothing: what benchmarks/overhead.py compares with.

A router has no flag for that; here what it calls for its metrics does nothing.
"""

import sys
from collections.abc import Callable
from typing import Any

from kvrouter import account, journey, relay, serve
from kvrouter._native import StreamFeed
from kvrouter.cli import main
from kvrouter.metrics import Histogram, Histograms, Tally

_NO_PARTS: account.Parts = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class _Quiet(relay.Relay):
    """A relay whose events nobody times."""

    def __init__(self, exchange: Any, answer: Any, _: Any, tidy: Any = None) -> None:
        self._exchange = exchange
        self._answer = answer
        self._feed = answer.feed or StreamFeed()
        self._tidy = tidy
        self._held = b""


def silence() -> None:
    """Have this process count nothing."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    for kind, name in ((Histogram, "observe"), (Histograms, "observe"), (Tally, "add")):
        setattr(kind, name, nothing)
    replace(journey, "note_plan", nothing)
    replace(serve, "note_end", lambda *_: _NO_PARTS)
    replace(relay, "Relay", _Quiet)
    from kvrouter import outlet  # noqa: PLC0415 - it must find the silent relay

    replace(outlet, "Relay", _Quiet)


def replace(module: Any, name: str, by: Callable[..., Any]) -> None:
    """Put `by` in the place of what the router calls; an error where there is no such name."""
    getattr(module, name)
    setattr(module, name, by)


if __name__ == "__main__":
    silence()
    sys.exit(main(sys.argv[1:]))
