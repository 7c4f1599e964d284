"""Real servers of each kind of tier, and the memory of a tier side."""

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.fakes.infinistore import InfiniStore
from tests.fakes.mooncake import MooncakeStore
from tests.fakes.redis import MISSING, RedisCluster, RedisServer, redis_server

from kvrouter_store.tiers.base import Memory
from kvrouter_store.tiers.staging import Staging

NO_FULL_COVERAGE = ("--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000")
# The folders of packages; .ci/stages/tiers.sh sets the first. benchmarks/connectors/make_peer.sh
# makes both.
MOONCAKE = os.environ.get("KVROUTER_MOONCAKE", "")
INFINISTORE = os.environ.get("KVROUTER_INFINISTORE", "")


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
        pytest.skip("there is no Mooncake Store (.ci/run tiers brings it)")
    monkeypatch.syspath_prepend(MOONCAKE)
    monkeypatch.setenv("PYTHONPATH", MOONCAKE)
    with MooncakeStore(tmp_path, Path(MOONCAKE)) as servers:
        yield servers


@pytest.fixture
def infinistore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InfiniStore]:
    """InfiniStore of this test's own, on an RDMA device."""
    if not INFINISTORE:
        pytest.skip("there is no InfiniStore (benchmarks/connectors/make_peer.sh brings it)")
    monkeypatch.syspath_prepend(INFINISTORE)
    monkeypatch.setenv("PYTHONPATH", INFINISTORE)
    with InfiniStore(tmp_path, Path(INFINISTORE)) as server:
        yield server


@pytest.fixture
async def memory() -> AsyncIterator[Memory]:
    """Memory of a tier side."""
    staging = Staging(8 << 20)
    yield staging.memory
    staging.close()
