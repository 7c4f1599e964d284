"""What all tests share."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The time of one example depends on the machine only.
settings.register_profile("kvrouter", deadline=None)
settings.load_profile("kvrouter")


@pytest.fixture(autouse=True)
def log_of_this_process() -> Iterator[None]:
    """Fails a test that leaves a handler of logs that writes.

    That of a command has a descriptor that a later test may have for something else.
    """
    before = list(logging.root.handlers)
    yield
    added = [handler for handler in logging.root.handlers if handler not in before]
    left = [handler for handler in added if not isinstance(handler, logging.NullHandler)]
    for handler in left:
        logging.root.removeHandler(handler)
    assert not left
