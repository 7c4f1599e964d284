"""Copies between a KV cache and the store, and what is reported of them, without an engine."""

import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from tests.fakes.vllm import FakeClient, FakeTensor, chain_of

from kvrouter_store._core import BlockStatus
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.vllm.plan import LoadOrder, SaveOrder, StepPlan
from kvrouter_store.connectors.vllm.settings import ConnectorRefused
from kvrouter_store.connectors.vllm.worker import WorkerSide, cache_segments
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import Layout

LAYERS, BLOCKS, PAGE = 3, 8, 64
SPEC = CacheSpec("tiny", "r1", "float32", 16, "sha256_cbor", "00" * 32)


def manifest_of(block_bytes: int) -> Manifest:
    part = Part((0, LAYERS), (0, 2), 0, block_bytes, Layout.opaque("test"))
    return Manifest(SPEC, (part,))


MANIFEST = manifest_of(LAYERS * PAGE)


def caches(address: int = 1 << 20) -> dict[str, FakeTensor]:
    """Tensors of (blocks, 64 bytes), one region per layer."""
    return {
        f"model.layers.{layer}.attn": FakeTensor((BLOCKS, PAGE), address + layer * BLOCKS * PAGE)
        for layer in range(LAYERS)
    }


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def worker(client: FakeClient) -> Iterator[WorkerSide]:
    log = logging.getLogger("worker")
    side = WorkerSide(0, lambda told: StoreLink(cast("Any", client), told, log), log)
    side.register(caches(), BLOCKS)
    yield side
    side.shutdown()


def load(request_id: str, hashes: list[bytes], first: int, ids: tuple[int, ...]) -> LoadOrder:
    return LoadOrder(request_id, b"".join(hashes[: first + len(ids)]), first, ids)


def plan(manifest: Manifest = MANIFEST, **orders: Any) -> StepPlan:
    return StepPlan(manifest.doc, **orders)


def ended(worker: WorkerSide) -> tuple[set[str], set[int]]:
    """What the next steps report, until a load ended."""
    worker.start_loads(plan(idle=True))
    for _ in range(2000):
        if finished := worker.finished_loads():
            return finished, worker.failed_blocks()
    raise AssertionError("no load ended")


def test_a_load_is_reported_when_it_ended(client: FakeClient, worker: WorkerSide) -> None:
    hashes = chain_of(4)
    client.held.update(hashes)
    worker.start_loads(plan(loads=[load("r", hashes, 1, (5, 2, 7))]))
    assert ended(worker) == ({"r"}, set())


def test_blocks_are_recomputed_from_the_first_bad_one_on(
    client: FakeClient, worker: WorkerSide
) -> None:
    hashes = chain_of(4)
    client.held.update(hashes)
    client.corrupt.add(hashes[2])
    worker.start_loads(plan(loads=[load("r", hashes, 0, (5, 2, 7, 1))]))
    assert ended(worker) == ({"r"}, {7, 1})


def test_a_store_that_is_away_fails_the_load_and_not_the_request(
    client: FakeClient, worker: WorkerSide
) -> None:
    worker.start_loads(plan(loads=[load("r", chain_of(2), 0, (5, 2))]))
    assert ended(worker) == ({"r"}, {5, 2})


def test_a_bug_in_a_load_is_a_failed_load(
    client: FakeClient, worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[BlockStatus]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(client, "get_into", broken)
    worker.start_loads(plan(loads=[load("r", chain_of(2), 0, (5, 2))]))
    assert ended(worker) == ({"r"}, {5, 2})


def test_failed_blocks_are_told_no_earlier_than_their_request(
    client: FakeClient, worker: WorkerSide
) -> None:
    worker.start_loads(plan(loads=[load("r", chain_of(1), 0, (5,))]))
    worker.shutdown()
    assert worker.failed_blocks() == set()
    assert worker.finished_loads() == {"r"}
    assert worker.failed_blocks() == {5}
    assert worker.failed_blocks() == set()


def test_saves_are_done_when_the_step_ends(client: FakeClient, worker: WorkerSide) -> None:
    hashes = chain_of(5)
    order = SaveOrder("r", b"".join(hashes), 2, (4, 0, 6))
    worker.save(plan(saves=[order]))
    assert client.held == set(hashes[2:])


@pytest.mark.parametrize("cause", [SystemExit, KeyboardInterrupt, RuntimeError])
def test_a_forward_pass_that_broke_off_publishes_nothing(
    client: FakeClient, worker: WorkerSide, cause: type[BaseException]
) -> None:
    order = SaveOrder("r", b"".join(chain_of(2)), 0, (4, 0))
    with pytest.raises(cause):
        step_that_raises(cause(), lambda: worker.save(plan(saves=[order])))
    assert client.calls == []
    worker.save(plan(saves=[order]))
    assert client.held == set(chain_of(2))


def step_that_raises(cause: BaseException, wait_for_save: Callable[[], None]) -> None:
    """A step as vLLM runs it."""
    try:
        raise cause
    finally:
        wait_for_save()


def test_only_the_first_of_several_ranks_with_the_same_heads_saves(client: FakeClient) -> None:
    log = logging.getLogger("worker")
    side = WorkerSide(1, lambda told: StoreLink(cast("Any", client), told, log), log)
    side.register(caches(), BLOCKS)
    order = SaveOrder("r", b"".join(chain_of(1)), 0, (4,))
    side.save(plan(saves=[order], replicas=2))
    assert client.calls == []


def test_a_cache_of_another_size_than_the_manifest_says_is_never_used(
    client: FakeClient, worker: WorkerSide
) -> None:
    other = manifest_of(LAYERS * PAGE + 64)
    hashes = chain_of(2)
    client.held.update(hashes)
    worker.save(plan(other, saves=[SaveOrder("r", b"".join(hashes), 0, (0, 1))]))
    worker.start_loads(plan(other, loads=[load("r", hashes, 0, (5, 2))]))
    assert ended(worker) == ({"r"}, {5, 2})
    assert client.calls == []


def test_layers_that_adjoin_are_copied_in_one_run_in_the_order_of_the_model() -> None:
    packed = {
        f"layers.{layer}": FakeTensor((BLOCKS, PAGE), 1000 + layer * PAGE, stride=12 * PAGE)
        for layer in (10, 9, 11, 0, 1, 2, 3, 4, 5, 6, 7, 8)
    }
    segments = cache_segments(packed, BLOCKS)
    assert segments.block_bytes == 12 * PAGE
    apart = {"layers.10": FakeTensor((BLOCKS, 32), 0), "layers.9": FakeTensor((BLOCKS, 64), 9000)}
    assert cache_segments(apart, BLOCKS).block_bytes == 96


def test_blocks_that_the_kernels_cut_up_are_copied_whole() -> None:
    assert cache_segments({"l": FakeTensor((4 * BLOCKS, PAGE), 0)}, BLOCKS).block_bytes == 4 * PAGE


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (FakeTensor((BLOCKS, PAGE), 0, device="cuda"), "host memory"),
        (FakeTensor((BLOCKS + 1, PAGE), 0), "one run"),
        (FakeTensor((BLOCKS, PAGE), 0, contiguous=False), "one run"),
        (FakeTensor((2 * BLOCKS, PAGE), 0, stride=2 * PAGE), "one run"),
    ],
)
def test_memory_that_cannot_be_copied_is_refused(tensor: FakeTensor, why: str) -> None:
    with pytest.raises(ConnectorRefused, match=why):
        cache_segments({"l": tensor}, BLOCKS)


def piece(hashes: list[bytes], first: int, ids: tuple[int, ...], **more: Any) -> LoadOrder:
    return LoadOrder("r", b"".join(hashes[: first + len(ids)]), first, ids, **more)


def test_a_request_that_comes_in_pieces_is_reported_with_the_last(
    client: FakeClient, worker: WorkerSide
) -> None:
    hashes = chain_of(4)
    client.held.update(hashes)
    worker.start_loads(plan(loads=[piece(hashes, 0, (5, 2), last=False)]))
    worker.start_loads(plan(loads=[load("other", hashes, 0, (1,))]))
    assert ended(worker) == ({"other"}, set())
    worker.start_loads(plan(loads=[piece(hashes, 2, (7, 3))]))
    assert ended(worker) == ({"r"}, set())


def test_behind_a_bad_piece_nothing_is_loaded_any_more(
    client: FakeClient, worker: WorkerSide
) -> None:
    hashes = chain_of(6)
    client.held.update(hashes)
    client.corrupt.add(hashes[1])
    worker.start_loads(plan(loads=[piece(hashes, 0, (5, 2), last=False)]))
    worker.start_loads(plan(loads=[piece(hashes, 2, (7,), last=False)]))
    worker.start_loads(plan(loads=[piece(hashes, 3, (3,), lost=(4, 6))]))
    assert ended(worker) == ({"r"}, {2, 7, 3, 4, 6})
    assert client.calls.count("get_into") == 1


def test_a_load_that_was_given_up_is_reported_without_its_rest(
    client: FakeClient, worker: WorkerSide
) -> None:
    hashes = chain_of(2)
    client.held.update(hashes)
    worker.start_loads(plan(loads=[piece(hashes, 0, (5, 2), last=False)]))
    worker.start_loads(plan(loads=[LoadOrder("r", b"", 0, ())]))
    assert ended(worker) == ({"r"}, set())
