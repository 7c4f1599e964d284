"""What a restarted node finds on its SSD: all that was durable, and nothing that is torn."""

import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.disk import BLOCK, MANIFEST, DiskNode, read
from tests.fakes.store import HASH_BYTES, chain_of, put_chain

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import KVStoreError

pytestmark = pytest.mark.slow
DATA_AT = 64 << 10  # where extents begin in kvstore.data
STORM_CHAINS = 600  # of each of three writers: less than 512 MiB in all
Start = Callable[..., DiskNode]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("io", ["io_uring", "threads", "auto"])
def test_a_restart_finds_again_what_was_durable(
    start_over_disk: Start, number: signal.Signals, io: str
) -> None:
    try:
        node = start_over_disk("--disk-io", io)
    except (ValueError, IndexError):
        pytest.skip(f"{io} does not work here: run on Linux outside of containers")
    chains = node.fill(3)
    assert node.flush() == 48
    node.end(number)
    node = start_over_disk("--disk-io", io)
    assert node.stat("blocks") == 0
    assert node.stat("disk_durable_blocks") == 48
    with StoreClient(node.url) as client:
        for hashes in chains:
            assert client.match(MANIFEST, hashes).blocks == 16
            assert read(client, hashes) == 16


def test_a_node_that_leaves_brings_its_memory_to_the_disk(start_over_disk: Start) -> None:
    node = start_over_disk()
    with StoreClient(node.url) as client:
        put_chain(client, MANIFEST, chain_of(32))
    assert node.stop() == 0
    assert "32 blocks are durable on the disk" in node.log
    node = start_over_disk()
    with StoreClient(node.url) as client:
        assert read(client, chain_of(32)) == 32


def test_a_kill_in_a_storm_of_puts_loses_nothing_that_was_acknowledged(
    start_over_disk: Start,
) -> None:
    node = start_over_disk(size="1GiB")  # the storm does not fill it: nothing is evicted
    writers = [threading.Thread(target=storm, args=(node.url, seed)) for seed in range(3)]
    for writer in writers:
        writer.start()
    acknowledged = put_and_flush(node)
    node.kill()
    for writer in writers:
        writer.join()
    assert acknowledged
    node = start_over_disk(size="1GiB")
    with StoreClient(node.url) as client:
        for hashes in acknowledged:
            assert read(client, hashes) == 4
        for seed in range(3):
            for k in range(200):
                read(client, chain_of(4, f"storm {seed} {k}"))
    assert node.stat("disk_errors_total.corrupt") == 0


def blocks_of(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def storm(url: str, seed: int) -> None:
    """Put until the node is away, or until the disk is half full."""
    with contextlib.suppress(KVStoreError), StoreClient(url, deadline_s=5) as client:
        for k in range(STORM_CHAINS):
            put_chain(client, MANIFEST, chain_of(4, f"storm {seed} {k}"))


def put_and_flush(node: DiskNode) -> list[bytes]:
    """Chains that were put and acknowledged as durable while nothing was skipped."""
    acknowledged: list[bytes] = []
    with StoreClient(node.url) as client:
        for k in itertools.count():
            if k >= 12 and acknowledged:
                break
            hashes = chain_of(4, f"mine {k}")
            skipped = node.stat("disk_skipped_total")
            put_chain(client, MANIFEST, hashes)
            node.flush()
            if node.stat("disk_skipped_total") == skipped:
                acknowledged.append(hashes)
    return acknowledged


@pytest.mark.parametrize("digests", ["checked", "off"])
def test_bytes_that_rotted_on_the_disk_are_dropped_and_never_served(
    start_over_disk: Start, tmp_path: Path, digests: str
) -> None:
    node = start_over_disk("--digests", digests)
    node.fill(2)
    node.kill()
    data = tmp_path / "disk" / "kvstore.data"
    with data.open("r+b") as file:
        for k in range(0, 32, 3):
            file.seek(DATA_AT + k * BLOCK + random.randrange(BLOCK - 8))
            file.write(os.urandom(8))
    node = start_over_disk("--digests", digests)
    with StoreClient(node.url) as client:
        for seed in ("chain 0", "chain 1"):
            for one in blocks_of(chain_of(16, seed)):
                read(client, one)
    assert node.stat("disk_dropped_total") == node.stat("disk_errors_total.corrupt") == 11
    assert node.stat("disk_blocks") == 21


@pytest.mark.parametrize("seed", range(4))
def test_a_journal_that_was_cut_still_serves_what_is_whole(
    start_over_disk: Start, tmp_path: Path, seed: int
) -> None:
    node = start_over_disk()
    chains = node.fill(3)
    node.kill()
    journal = tmp_path / "disk" / "kvstore.journal"
    cut = random.Random(seed).randrange(journal.stat().st_size)
    os.truncate(journal, cut)
    node = start_over_disk()
    found = node.stat("disk_blocks")
    with StoreClient(node.url) as client:
        assert sum(read(client, one) for hashes in chains for one in blocks_of(hashes)) == found
        assert found <= 48
        put_chain(client, MANIFEST, chain_of(4, "new"))
        node.flush()
        assert read(client, chain_of(4, "new")) == 4


def test_tenants_find_their_own_blocks_after_a_restart(
    start_over_disk: Start, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"

    def say(*lines: str) -> None:
        tokens.write_text("\n".join(lines))
        tokens.chmod(0o600)

    first, second = "first:" + "a" * 20, "second:" + "b" * 20
    say(first, second)
    node = start_over_disk("--token-file", str(tokens))
    with StoreClient(node.url, token="a" * 20) as client:
        put_chain(client, MANIFEST, chain_of(8))
    node.stop()
    say(second, first)  # in another order, with other numbers inside
    node = start_over_disk("--token-file", str(tokens))
    with StoreClient(node.url, token="b" * 20) as other:
        assert other.match(MANIFEST, chain_of(8)).blocks == 0
        assert other.purge() == 0
    with StoreClient(node.url, token="a" * 20) as client:
        assert read(client, chain_of(8)) == 8
    node.stop()
    say(second)
    node = start_over_disk("--token-file", str(tokens))
    with StoreClient(node.url, token="b" * 20) as other:
        assert other.match(MANIFEST, chain_of(8)).blocks == 0
