"""Objects anywhere in LMCache's memory are blocks of the store's client."""

import pytest

from kvrouter_store.connectors.lmcache.memory import ObjectMemory

START, SIZE = 1 << 20, 4096


def test_an_object_is_where_its_address_says() -> None:
    addresses = [START + 512, START, START + SIZE - 100]
    segments, indices = ObjectMemory(START, SIZE).place(addresses, 100)
    assert segments.pieces(indices) == [[(address, 100)] for address in addresses]


def test_objects_of_one_size_share_their_segments_and_others_have_others() -> None:
    memory = ObjectMemory(START, SIZE)
    first, _ = memory.place([START], 100)
    assert memory.place([START + 7], 100)[0] is first
    assert memory.place([START], 200)[0].block_bytes == 200


@pytest.mark.parametrize("address", [START - 1, START + SIZE - 99])
def test_an_object_outside_of_the_memory_is_refused(address: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        ObjectMemory(START, SIZE).place([START, address], 100)


def test_objects_are_found_where_lmcache_says_nothing_of_its_memory() -> None:
    segments, indices = ObjectMemory().place([START + 512, START], 100)
    assert segments.pieces(indices) == [[(START + 512, 100)], [(START, 100)]]
    assert segments.blocks == 513
