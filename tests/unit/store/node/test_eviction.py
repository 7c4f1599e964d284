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


def told_of_eviction(folder: Path, *flags: str) -> list[str]:
    """The warnings about it that a node with these flags logs."""
    node = StoreProcess(folder, "8MiB", *flags).start()
    assert node.stop() == 0
    lines = [json.loads(line) for line in node.log.splitlines()]
    return [
        f"{line['level']}: {line['message']}" for line in lines if "eviction" in line["message"]
    ]


def test_a_node_told_to_use_s3fifo_uses_density_and_says_so_once(tmp_path: Path) -> None:
    told = told_of_eviction(tmp_path, "--eviction", "s3fifo")
    assert told == ["warning: --eviction s3fifo is deprecated: this node uses density"]


def test_a_node_that_saves_seconds_over_a_disk_is_advised_against_it_once(tmp_path: Path) -> None:
    disk = ("--disk", str(tmp_path), "--disk-size", "16MiB")
    assert told_of_eviction(tmp_path, "--eviction-objective", "tokens", *disk) == []
    (told,) = told_of_eviction(tmp_path, "--eviction-objective", "seconds", *disk)
    assert told.startswith("warning: --eviction-objective seconds is for nodes without --disk")


def test_a_node_with_memory_alone_saves_seconds_without_a_word(tmp_path: Path) -> None:
    assert told_of_eviction(tmp_path, "--eviction-objective", "seconds") == []
