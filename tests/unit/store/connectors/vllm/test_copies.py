"""Blocks of another node, copied to the engine's own: over two real nodes."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, chain_of, manifest_of, overwrite_stored, put_chain

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.neighbours import Neighbours
from kvrouter_store.connectors.vllm_tier import copies
from kvrouter_store.connectors.vllm_tier.copies import NodeCopies

BLOCK = 64 << 10
MANIFEST = manifest_of(BLOCK)
GROUP = (0).to_bytes(4, "big")
Connect = Callable[..., StoreClient]


class Far:
    """The other node, with what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.unix_path = str(folder / "far.sock")
        self.node = StoreServer(unix_path=self.unix_path, pool_bytes=16 << 20)
        self.node.start()
        self.url = f"kv://127.0.0.1:{self.node.port}"

    def holds(self, hashes: bytes) -> None:
        with StoreClient(self.url) as client:
            put_chain(client, MANIFEST, hashes)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    far = Far(tmp_path)
    yield far
    far.node.stop()


@pytest.fixture
def own(connect: Connect) -> Iterator[StoreLink]:
    link = StoreLink(connect(), MANIFEST, logging.getLogger("copies"), engine="e1")
    link.start()
    assert eventually(lambda: bool(link.latest))
    yield link
    link.close()


@pytest.fixture
def copied(own: StoreLink, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeCopies]:
    """Copies pieces of two blocks."""
    monkeypatch.setattr(copies, "PIECE_BYTES", 2 * BLOCK)
    neighbours = Neighbours(lambda node: StoreClient(node, transport="tcp"), StoreClient.close)
    made = NodeCopies({0: own}, neighbours)
    yield made
    made.close()
    neighbours.close()


def keys_of(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + 32] + GROUP for at in range(0, len(hashes), 32)]


@pytest.mark.parametrize("blocks", [1, 2, 5, 8])
def test_blocks_of_another_node_are_in_the_own_one_with_the_bytes_that_were_put(
    far: Far, own: StoreLink, copied: NodeCopies, blocks: int
) -> None:
    hashes = chain_of(blocks)
    far.holds(hashes)
    copied.fetch(far.url, 0, keys_of(hashes))
    memory, span = Memory(blocks, BLOCK), range(blocks)
    got = own.get_into(0, hashes, span, memory.segments, span)
    assert got == [BlockStatus.OK] * blocks
    assert memory.data == Memory(blocks, BLOCK).holds(hashes).data


def test_what_follows_a_block_that_the_other_node_lacks_is_left_out(
    far: Far, own: StoreLink, copied: NodeCopies
) -> None:
    hashes = chain_of(6)
    far.holds(hashes[: 3 * 32])
    copied.fetch(far.url, 0, keys_of(hashes))
    assert own.match(hashes) == 3


def test_a_block_that_decayed_at_the_other_node_is_left_out(
    far: Far, own: StoreLink, copied: NodeCopies
) -> None:
    hashes = chain_of(4)
    far.holds(hashes)
    overwrite_stored(far.unix_path, MANIFEST, hashes[32:64], bytes(BLOCK))
    copied.fetch(far.url, 0, keys_of(hashes))
    assert own.match(hashes) == 1


def test_a_node_that_is_away_costs_a_line_in_the_log(
    far: Far, own: StoreLink, copied: NodeCopies, caplog: pytest.LogCaptureFixture
) -> None:
    far.node.stop()
    copied.fetch(far.url, 0, keys_of(chain_of(2)))
    assert far.url in caplog.text
    assert own.match(chain_of(2)) == 0
