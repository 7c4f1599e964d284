"""Every eviction policy in a node whose pool is too small, with bytes that are looked at."""

import json
from pathlib import Path

import pytest
from tests.fakes.store import Memory, StoreProcess, chain_of, manifest_of, put_chain

from kvrouter_store._core import EVICTION_POLICIES, BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient

BLOCK = 4096
POOL_BLOCKS = 256
MANIFEST = manifest_of(BLOCK)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_what_stays_is_a_prefix_and_has_its_own_bytes(policy: str) -> None:
    node = StoreServer(pool_bytes=POOL_BLOCKS * BLOCK, granule_bytes=BLOCK, eviction=policy)
    node.start()
    try:
        with StoreClient(f"kv://127.0.0.1:{node.port}") as client:
            client.register(MANIFEST)
            chains = [chain_of(20, seed=str(number)) for number in range(40)]
            for chain in chains:
                put_chain(client, MANIFEST, chain)
                client.match(MANIFEST, chains[0])
            assert client.stats()["evictions_total"] >= 40 * 20 - POOL_BLOCKS
            kept = [client.match(MANIFEST, chain).blocks for chain in chains]
            assert POOL_BLOCKS // 2 < sum(kept) <= POOL_BLOCKS
            assert kept[-1] == 20
            for chain, blocks in zip(chains, kept, strict=True):
                if not blocks:
                    continue
                held, memory = chain[: 32 * blocks], Memory(blocks, BLOCK)
                span = range(blocks)
                got = client.get_into(MANIFEST, 0, held, span, memory.segments, span)
                assert got == [BlockStatus.OK] * blocks
                assert memory.data == Memory(blocks, BLOCK).holds(held).data
    finally:
        node.stop()


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no such eviction policy"):
        StoreServer(pool_bytes=1 << 20, eviction="fifo")


def test_a_node_told_to_use_s3fifo_uses_density_and_says_so_once(tmp_path: Path) -> None:
    node = StoreProcess(tmp_path, "8MiB", "--eviction", "s3fifo").start()
    assert node.stop() == 0
    lines = [json.loads(line) for line in node.log.splitlines()]
    told = [(line["level"], line["message"]) for line in lines if "eviction" in line["message"]]
    assert told == [("warning", "--eviction s3fifo is deprecated: this node uses density")]
