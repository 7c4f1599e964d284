"""A redis-server for those tests that share something over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.redis import MISSING, RedisServer, redis_server


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server of this test's own."""
    if redis_server() is None:
        pytest.skip(MISSING)
    with RedisServer(tmp_path) as server:
        yield server
