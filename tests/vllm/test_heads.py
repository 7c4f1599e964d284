"""Engines with other numbers of ranks read what each other wrote, head by head."""

import json
import logging
import os
import random
import subprocess
from collections.abc import Iterator
from ctypes import addressof, c_char
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.vllm import FakeTensor, chain_of

from kvrouter_store._core import StoreServer, crc32c
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.vllm.plan import LoadOrder, SaveOrder, StepPlan
from kvrouter_store.connectors.vllm.settings import ConnectorRefused
from kvrouter_store.connectors.vllm.worker import WorkerSide, head_segments
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import Layout

INSIDE = Path(__file__).parent / "inside"
LAYERS, BLOCKS, HEADS, HEAD_BYTES = 3, 6, 4, 48
SPEC = CacheSpec("tiny", "r1", "float32", 16, "sha256_cbor", "00" * 32)
HASHES = chain_of(4)


def manifest_of(parts: int) -> Manifest:
    each = HEADS // parts
    layout = Layout.per_head("test", HEAD_BYTES)
    size = LAYERS * each * HEAD_BYTES
    return Manifest(
        SPEC,
        tuple(Part((0, LAYERS), (n * each, (n + 1) * each), 0, size, layout) for n in range(parts)),
    )


class Rank:
    """A worker with a KV cache of its share of the heads, as vLLM's CPU backend lays it out."""

    def __init__(self, url: str, rank: int, ranks: int, parts: int) -> None:
        self.heads = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        self.data = bytearray(LAYERS * BLOCKS * len(self.heads) * HEAD_BYTES)
        self._view = (c_char * len(self.data)).from_buffer(self.data)
        self._manifest, self._rank_parts = manifest_of(parts), parts // ranks
        self._log = logging.getLogger("rank")
        self._url = url
        self.worker = WorkerSide(rank, self._link, self._log)
        self.worker.register(self.caches(), BLOCKS)

    def caches(self) -> dict[str, Any]:
        """A tensor per layer: (blocks, heads, bytes)."""
        shape = (BLOCKS, len(self.heads), HEAD_BYTES)
        size = BLOCKS * len(self.heads) * HEAD_BYTES
        base = addressof(self._view)
        return {f"layers.{n}": FakeTensor(shape, base + n * size) for n in range(LAYERS)}

    def head(self, layer: int, block: int, head: int) -> slice:
        """Where the bytes of one of all heads lie."""
        place = (layer * BLOCKS + block) * len(self.heads) + head - self.heads.start
        return slice(place * HEAD_BYTES, (place + 1) * HEAD_BYTES)

    def save(self, block_ids: tuple[int, ...]) -> None:
        order = SaveOrder("r", b"".join(HASHES), 0, block_ids)
        self.worker.save(self._plan(saves=[order]))

    def load(self, block_ids: tuple[int, ...]) -> set[int]:
        """Load the chain; the blocks that failed."""
        order = LoadOrder("r", b"".join(HASHES), 0, block_ids)
        self.worker.start_loads(self._plan(loads=[order], idle=True))
        for _ in range(2000):
            if self.worker.finished_loads():
                return self.worker.failed_blocks()
        raise AssertionError("no load ended")

    def _plan(self, **orders: Any) -> StepPlan:
        return StepPlan(self._manifest.doc, rank_parts=self._rank_parts, **orders)

    def _link(self, manifest: Manifest) -> StoreLink:
        return StoreLink(StoreClient(self._url), manifest, self._log)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    node = StoreServer(unix_path=str(tmp_path / "s.sock"), pool_bytes=16 << 20)
    node.start()
    yield node
    node.stop()


@pytest.fixture
def engine(server: StoreServer) -> Iterator[Any]:
    """Makes the ranks of an engine."""
    made: list[Rank] = []

    def engine(ranks: int, parts: int) -> list[Rank]:
        url = f"kv://127.0.0.1:{server.port}"
        some = [Rank(url, rank, ranks, parts) for rank in range(ranks)]
        made.extend(some)
        return some

    yield engine
    for rank in made:
        rank.worker.shutdown()


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 2), (1, 1)])
def test_every_head_is_read_back_where_the_other_engine_has_it(
    engine: Any, writers: int, readers: int, parts: int
) -> None:
    truth = {
        (layer, block, head): random.Random(f"{layer} {block} {head}").randbytes(HEAD_BYTES)
        for layer in range(LAYERS)
        for block in range(len(HASHES))
        for head in range(HEADS)
    }
    for rank in engine(writers, parts):
        for (layer, block, head), content in truth.items():
            if head in rank.heads:
                rank.data[rank.head(layer, block + 1, head)] = content
        rank.save((1, 2, 3, 4))
    for rank in engine(readers, parts):
        assert rank.load((5, 3, 0, 2)) == set()
        for (layer, block, head), content in truth.items():
            if head in rank.heads:
                assert rank.data[rank.head(layer, (5, 3, 0, 2)[block], head)] == content


def test_a_block_of_which_one_part_is_missing_is_not_loaded(engine: Any) -> None:
    first, _ = engine(2, 2)
    first.save((1, 2, 3, 4))
    (reader,) = engine(1, 2)
    assert reader.load((5, 3, 0, 2)) == {5, 3, 0, 2}


def test_a_part_is_layer_by_layer_the_bytes_of_its_heads(engine: Any) -> None:
    (rank,) = engine(1, 4)
    rank.data[:] = random.Random(3).randbytes(len(rank.data))
    for number, share in enumerate(head_segments(rank.caches(), BLOCKS, 4)):
        wanted = b"".join(rank.data[rank.head(layer, 2, number)] for layer in range(LAYERS))
        assert share.digests([2]) == [crc32c(wanted)]


@pytest.mark.parametrize(
    ("shape", "parts"), [((BLOCKS, 3, 8), 2), ((BLOCKS, 64), 2), ((2 * BLOCKS, 4, 8), 2)]
)
def test_heads_that_cannot_be_told_apart_are_refused(shape: tuple[int, ...], parts: int) -> None:
    with pytest.raises(ConnectorRefused, match='leave "parts" out'):
        head_segments({"l": FakeTensor(shape, 0)}, BLOCKS, parts)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_vllm_writes_each_heads_bytes_together(vllm_python: Path) -> None:
    done = subprocess.run(
        [vllm_python, INSIDE / "heads.py"],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    assert all(found.values()), found
