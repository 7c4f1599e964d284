"""Demos that are ended with their test."""

from collections.abc import Iterator

import pytest
from tests.tools.demo.running import Running


@pytest.fixture
def running() -> Iterator[type[Running]]:
    started: list[Running] = []

    class Tracked(Running):
        def __init__(self, *flags: str) -> None:
            super().__init__(*flags)
            started.append(self)

    yield Tracked
    for demo in started:
        demo.close()
