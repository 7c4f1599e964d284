"""Real servers of each kind of tier, and the memory of a tier side."""

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.mooncake import MooncakeStore
from tests.fakes.redis import MISSING, RedisCluster, RedisServer, redis_server

from kvrouter_store.tiers.base import Memory
from kvrouter_store.tiers.staging import Staging

TIERS: list[Any] = ["redis", "cluster", pytest.param("mooncake", marks=pytest.mark.mooncake)]
"""Fixtures whose `url` is that of a tier that is there."""
NO_FULL_COVERAGE = ("--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000")
# The folder of its package; .ci/stages/tiers.sh sets it.
MOONCAKE = os.environ.get("KVROUTER_MOONCAKE", "")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server of this test's own."""
    if redis_server() is None:
        pytest.skip(MISSING)
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    """A cluster of three masters of this test's own."""
    if redis_server() is None or shutil.which("redis-cli") is None:
        pytest.skip(MISSING)
    with RedisCluster(tmp_path, *NO_FULL_COVERAGE) as servers:
        yield servers


@pytest.fixture
def mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeStore]:
    """Mooncake Store of this test's own. Tiers of this test find its package."""
    if not MOONCAKE:
        pytest.skip("there is no Mooncake Store: run with .ci/stages/tiers.sh")
    monkeypatch.syspath_prepend(MOONCAKE)
    monkeypatch.setenv("PYTHONPATH", MOONCAKE)
    with MooncakeStore(tmp_path, Path(MOONCAKE)) as servers:
        yield servers


@pytest.fixture
async def memory() -> AsyncIterator[Memory]:
    """Memory of a tier side."""
    staging = Staging(8 << 20)
    yield staging.memory
    staging.close()
