"""JSON of peers, bounded before anything is made of it: to make it keeps the event loop."""

from __future__ import annotations

from typing import Any, Final

import orjson

from kvrouter._native import json_within

MAX_VALUES: Final = 200_000  # values and names: some 20 ms at most
MAX_CONTAINERS: Final = 40_000  # arrays and objects, which cost most
MAX_LEVELS: Final = 64
ANSWER_VALUES: Final = 800_000
ANSWER_CONTAINERS: Final = 160_000
"""Of a whole answer: 4,096 tokens with twenty log probabilities each, in 50 ms."""
ANSWER_BYTES: Final = 4 << 20
SHORT_BYTES: Final = 64 << 10  # what is shorter takes a millisecond, whatever it is


def bounded(
    text: bytes, max_values: int = MAX_VALUES, max_containers: int = MAX_CONTAINERS
) -> bytes:
    """`text`, to be read as JSON within milliseconds; ValueError: it has too many values or levels.

    A reader that passes over what it does not know needs no bound of values, but of containers.
    """
    if not json_within(text, max_values, max_containers, MAX_LEVELS):
        raise ValueError("more values or levels of JSON than are read")
    return text


def read_answer(body: bytes) -> Any:
    """A whole answer of an engine; ValueError: it is no JSON, or too much."""
    if len(body) > ANSWER_BYTES:
        raise ValueError(f"an answer of more than {ANSWER_BYTES} bytes")
    return orjson.loads(bounded(body, ANSWER_VALUES, ANSWER_CONTAINERS))


def read_event(data: bytes) -> Any:
    """The data of one event, likewise."""
    return orjson.loads(data if len(data) < SHORT_BYTES else bounded(data))
