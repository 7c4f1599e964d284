"""What the tables of tiers share: real servers, nodes over them, and blocks with their keys."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.fakes.mooncake import MooncakeStore
from tests.fakes.patience import eventually
from tests.fakes.redis import RedisCluster, RedisServer
from tests.fakes.store import Memory, StoreProcess, chain_of, manifest_of

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.dialer import TransportName
from kvrouter_store.tiers.blocks import BlockValues

MIB = 1 << 20
KINDS = ("Redis", "Redis cluster", "Mooncake")
SEGMENT_BYTES = 1024 * MIB
EVICTING = ("--maxmemory", str(3 * SEGMENT_BYTES), "--maxmemory-policy", "allkeys-lru")
TIER_MEMORY = 64 * MIB
PATIENCE_S = 30.0
MOONCAKE = os.environ.get("KVROUTER_MOONCAKE", "")


class Node(StoreProcess):
    """A store node, over a tier where it has the URL of one."""

    def __init__(self, folder: Path, memory_bytes: int, tier: str = "", *flags: str) -> None:
        folder.mkdir()
        below = ("--tier", tier, "--tier-memory", str(TIER_MEMORY)) if tier else ()
        super().__init__(folder, str(memory_bytes), *below, *flags)
        self.program = ["-m", "tests.fakes.patient_store"]
        self._tiers = 1 if tier else 0

    def __enter__(self) -> Self:
        self.start()
        if not eventually(lambda: self.metric("kvstore:tier_up") == self._tiers, PATIENCE_S):
            raise RuntimeError(f"the tier does not answer: {self.log}")
        return self

    def client(self, transport: TransportName = "shm") -> StoreClient:
        """A client of an engine."""
        return StoreClient(self.url, transport=transport, deadline_s=PATIENCE_S)


class Blocks:
    """`count` blocks of a size, in memory of their own."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self.count = count
        self.manifest = manifest_of(block_bytes)
        self.values = BlockValues("", self.manifest)
        self.memory = Memory(count, block_bytes).holds(chain_of(count))
        self.bytes = count * block_bytes
        self._chains = 0

    def next(self) -> bytes:
        """The hashes of a chain that nobody has. Its bytes are those of all other chains."""
        self._chains += 1
        return chain_of(self.count, f"{self.count} {self._chains}")

    def keys(self, hashes: bytes) -> list[str]:
        """Under which a tier has the blocks."""
        return self.values.keys([hashes[at : at + 32] for at in range(0, len(hashes), 32)])


def write(client: StoreClient, blocks: Blocks, hashes: bytes, first: int = 0) -> None:
    """Put the blocks of a chain from `first` on; then ask something, as routers do.

    The node takes what was posted before it answers.
    """
    span = range(first, len(hashes) // 32)
    done = client.put(blocks.manifest, 0, hashes, span, blocks.memory.segments, span)
    if done.stored != len(span):
        raise RuntimeError("the node has no room for the blocks")
    client.stats()


def read(client: StoreClient, blocks: Blocks, hashes: bytes, into: Memory) -> None:
    """Get all blocks of a chain into other memory of this size."""
    span = range(len(hashes) // 32)
    got = client.get_into(blocks.manifest, 0, hashes, span, into.segments, span)
    if set(got) != {BlockStatus.OK}:
        raise RuntimeError(f"of {len(span)} blocks, {got.count(BlockStatus.OK)} came")


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[str]:
    """The URL of servers of this kind. RuntimeError where they are not installed."""
    folder.mkdir()
    if kind.startswith("Redis") and not shutil.which("redis-server"):
        raise RuntimeError("there is no redis-server")
    if kind == "Redis":
        with RedisServer(folder, *EVICTING) as server:
            yield server.url
    elif kind == "Redis cluster":
        with RedisCluster(folder, *EVICTING) as cluster:
            yield cluster.url
    elif not MOONCAKE:
        raise RuntimeError("KVROUTER_MOONCAKE does not name its folder")
    else:
        sys.path.insert(0, MOONCAKE)
        os.environ["PYTHONPATH"] = MOONCAKE
        with MooncakeStore(folder, Path(MOONCAKE), 3, SEGMENT_BYTES, lease_ms=5000) as store:
            yield store.url
