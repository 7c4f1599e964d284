"""JSON of peers, bounded before anything is made of it: to make it keeps the event loop."""

from __future__ import annotations

from typing import Final

from kvrouter._native import json_within

MAX_VALUES: Final = 200_000
"""Values and names: some 20 ms at most."""
MAX_CONTAINERS: Final = 40_000
"""Arrays and objects, which cost most."""
MAX_LEVELS: Final = 64


class TooMuch(ValueError):
    """JSON beyond the bounds."""


def bounded(
    text: bytes, max_values: int = MAX_VALUES, max_containers: int = MAX_CONTAINERS
) -> bytes:
    """`text`, to be read as JSON within milliseconds; TooMuch: it has too many values or levels.

    A reader that passes over what it does not know needs no bound of values, but of containers.
    """
    if not json_within(text, max_values, max_containers, MAX_LEVELS):
        raise TooMuch("more values or levels of JSON than are read")
    return text
