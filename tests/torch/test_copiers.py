"""What every copier does, whether tensors are in host memory or behind a ring of it."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.torch.caches import (
    BLOCK_BYTES,
    DEVICE,
    LAYERS,
    WAIT_S,
    PretendedDevice,
    contents,
    contiguous,
    equal,
    linked,
    paged,
    put_all,
    some,
)

from kvrouter_store.tensors.base import Copier, CopyFailed, NoRoom
from kvrouter_store.tensors.client import TensorClient
from kvrouter_store.tensors.host import HostCopier
from kvrouter_store.tensors.layers import LayerBlocks
from kvrouter_store.tensors.staged import StagedCopier

pytestmark = pytest.mark.torch
Make = Callable[[], Copier]


def staged(slots: int = 2, blocks: int = 2, device: PretendedDevice | None = None) -> StagedCopier:
    """A ring with room for so many blocks of a layer in each slot."""
    return StagedCopier(device or PretendedDevice(), slots=slots, slot_bytes=blocks * BLOCK_BYTES)


@pytest.fixture(params=[HostCopier, staged], ids=["host", "staged"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.mark.parametrize("source", [contiguous, paged])
@pytest.mark.parametrize("places", [[0], [7, 0], [2, 3, 4, 5, 6], [7, 0, 4, 5, 2]])
def test_what_was_put_is_got_into_any_kind_of_cache(
    make: Make, url: str, source: Callable[[int], list[LayerBlocks]], places: list[int]
) -> None:
    put = some(source(8), places)
    with linked(url, put.layers) as link, TensorClient(link, make()) as client:
        assert put_all(client, put) == len(places)
        for got in (
            some(paged(9, empty=True), places),
            some(contiguous(9, empty=True), range(len(places))),
        ):
            assert client.get_tensors_into(got) == len(places)
            assert equal(put, got)
            others = sorted(set(range(9)) - set(got.indices))
            assert not any(each[others].any() for layer in got.layers for each in layer.tensors)


def test_a_run_in_the_middle_of_a_chain_is_put_behind_what_is_there(make: Make, url: str) -> None:
    whole = some(contiguous(6), range(6))
    with linked(url, whole.layers) as link, TensorClient(link, make()) as client:
        assert put_all(client, some(whole.layers, [0, 1])) == 2
        assert put_all(client, some(whole.layers, [2, 3, 4, 5], first=2)) == 4
        got = some(paged(6, empty=True), [3, 1, 4, 0, 5, 2])
        assert client.get_tensors_into(got) == 6
        assert equal(whole, got)


def test_a_prefix_of_what_is_asked_for_comes(make: Make, url: str) -> None:
    source = some(contiguous(3), range(3))
    with linked(url, source.layers) as link, TensorClient(link, make()) as client:
        assert client.get_tensors_into(some(contiguous(5, empty=True), range(5))) == 0
        assert put_all(client, source) == 3
        got = some(contiguous(5, empty=True), range(5))
        assert client.get_tensors_into(got) == 3
        assert equal(source, some(got.layers, range(3)))


def test_memory_that_is_used_again_is_of_the_same_segments(make: Make) -> None:
    """An RDMA device registers them once."""
    copier, layer = make(), contiguous(4)[0]
    described = set()
    for places in ([0, 1], [3], [2, 0]):
        first, second = (copier.stage(layer, places, WAIT_S) for _ in range(2))
        described |= {first.memory.segments, second.memory.segments}
        assert first.memory.blocks >= len(first.indices)
        first.release()
        second.release()
    assert len(described) == (1 if isinstance(copier, HostCopier) else 2)
    copier.close()


def test_nothing_is_asked_for_no_blocks(make: Make, url: str) -> None:
    nothing = some(contiguous(2), [])
    with linked(url, nothing.layers) as link, TensorClient(link, make()) as client:
        assert put_all(client, nothing) == 0
        assert client.get_tensors_into(nothing) == 0


def test_a_copy_takes_what_was_computed_before_and_not_after(url: str) -> None:
    """A device copies late: the ring keeps the bytes of the time of the copy."""
    device = PretendedDevice(held=True)
    source = some(contiguous(2), range(2))
    copier = staged(slots=LAYERS, device=device)
    with linked(url, source.layers) as link, TensorClient(link, copier) as client:
        with client.put_tensors(source) as put:
            for layer in range(LAYERS):
                put.layer(layer)
            assert link.match(source.hashes) == 0
            device.held = False
            assert put.finish() == 2
        got = some(paged(2, empty=True), [1, 0])
        assert client.get_tensors_into(got) == 2
    assert equal(source, got)


def test_a_full_ring_holds_up_the_next_layer_until_there_is_room(url: str) -> None:
    device = PretendedDevice(held=True)
    source = some(contiguous(2), range(2))
    copier = staged(slots=1, device=device)
    with linked(url, source.layers) as link, TensorClient(link, copier) as client:
        put = client.put_tensors(source)
        put.layer(0)
        second = threading.Thread(target=put.layer, args=(1,))
        second.start()
        second.join(0.05)
        assert second.is_alive()
        device.held = False
        second.join(WAIT_S)
        put.layer(2)
        assert put.finish() == 2


def test_a_layer_that_finds_no_room_in_time_is_not_put_and_nothing_fails(url: str) -> None:
    source = some(contiguous(2), range(2))
    copier = staged(slots=1)
    with (
        linked(url, source.layers) as link,
        TensorClient(link, copier, deadline_s=0.05) as client,
        client.put_tensors(source) as put,
    ):
        taken = copier.ring.acquire(0)
        put.layer(0)
        copier.ring.release(taken)
        for layer in (1, 2):
            put.layer(layer)
        assert put.finish() == 0
        assert link.match(source.hashes) == 0


@pytest.mark.parametrize("late", [False, True], ids=["when it begins", "when it ends"])
def test_after_a_failed_copy_nothing_is_put_any_more(url: str, late: bool) -> None:
    device = PretendedDevice(held=late, broken="" if late else "an illegal memory access")
    source = some(contiguous(2), range(2))
    with linked(url, source.layers) as link:
        with TensorClient(link, staged(slots=4, device=device)) as client:
            put = client.put_tensors(source)
            put.layer(0)
            device.broken = "an illegal memory access"
            for layer in (1, 2):
                put.layer(layer)
            with pytest.raises(CopyFailed, match="an illegal memory access"):
                put.finish()
            device.broken, device.held = "", False
            again = client.put_tensors(some(source.layers, [0, 1]))
            again.layer(0)
            with pytest.raises(CopyFailed, match="an earlier copy failed"):
                again.finish()
            with pytest.raises(CopyFailed, match="an earlier copy failed"):
                client.get_tensors_into(source)
        assert link.match(source.hashes) == 0


def test_a_copy_that_does_not_end_fails_after_the_deadline(url: str) -> None:
    source = some(contiguous(1), [0])
    with linked(url, source.layers) as link:
        copier = staged(device=PretendedDevice(held=True))
        with TensorClient(link, copier, deadline_s=0.05) as client:
            put = client.put_tensors(source)
            put.layer(0)
            with pytest.raises(CopyFailed, match=r"did not end within 0.05 s"):
                put.finish()


def test_a_slot_smaller_than_a_block_is_refused(url: str) -> None:
    source = some(contiguous(1), [0])
    with linked(url, source.layers) as link:
        copier = StagedCopier(PretendedDevice(), slots=1, slot_bytes=BLOCK_BYTES - 1)
        with TensorClient(link, copier) as client:
            with pytest.raises(ValueError, match="has no room for a block"):
                client.get_tensors_into(source)
            with pytest.raises(ValueError, match="has no room for a block"):
                client.put_tensors(source).layer(0)


@pytest.mark.parametrize("places", [[0, 1], [1, 0]])
def test_a_ring_serves_more_than_it_holds_and_gets_every_slot_back(
    url: str, places: Sequence[int]
) -> None:
    source = some(contiguous(2), places)
    with linked(url, source.layers) as link:
        copier = staged(slots=1, blocks=1)
        with TensorClient(link, copier) as client:
            for _ in range(5):
                assert put_all(client, source) == 2
                assert client.get_tensors_into(source) == 2
            assert copier.ring.acquire(0) == 0
            with pytest.raises(NoRoom):
                copier.ring.acquire(0)
            copier.ring.release(0)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU: run with make gpu-check")
@pytest.mark.parametrize("places", [[2, 0, 5], [1, 2, 3]])
def test_a_gpu_keeps_the_contract(url: str, places: list[int]) -> None:
    from kvrouter_store.tensors.cuda import cuda_copier

    put = some(on_device(paged(6)), places)
    got = some(on_device(paged(6, empty=True)), places[::-1])
    read = some(contiguous(3, empty=True), range(3))
    with linked(url, put.layers) as link:
        with TensorClient(link, cuda_copier(slots=2, slot_bytes=2 * BLOCK_BYTES)) as client:
            assert put_all(client, put) == 3
            assert client.get_tensors_into(got) == 3
        with TensorClient(link, HostCopier()) as client:
            assert client.get_tensors_into(read) == 3
    assert equal(put, got)
    for one, other in zip(contents(put), contents(read), strict=True):
        assert torch.equal(one.cpu(), other)


def on_device(layers: list[LayerBlocks]) -> list[LayerBlocks]:
    """The same in the memory of a GPU."""
    return [LayerBlocks(tuple(each.to(DEVICE) for each in layer.tensors)) for layer in layers]
