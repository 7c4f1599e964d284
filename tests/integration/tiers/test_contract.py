"""What every tier does, against real servers. For InfiniStore tests/rdma/ runs it."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from tests.integration.tiers.conftest import TIERS

from kvrouter_store.tiers.base import Item, Memory, Tier, TierAway, TierStatus
from kvrouter_store.tiers.registry import open_tier

OK, MISSING = TierStatus.OK, TierStatus.MISSING


@pytest.fixture(params=TIERS)
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a server that runs."""
    server = request.getfixturevalue(request.param)
    return str(server.url)


@pytest.fixture
async def tier(url: str, memory: Memory) -> AsyncIterator[Tier]:
    """The tier, started."""
    opened = open_tier(url)
    try:
        await opened.start(memory)
        yield opened
    finally:
        await opened.stop()


def values(memory: Memory, size: int, count: int = 3, *, first: int = 0) -> list[Item]:
    """Values of random bytes in the memory, at keys that nothing else has."""
    items = []
    for k in range(count):
        at = first + k * size
        memory.view[at : at + size] = os.urandom(size)
        items.append(Item(f"kvrouter:test:{os.urandom(8).hex()}", at, size))
    return items


def bytes_of(memory: Memory, items: list[Item]) -> list[bytes]:
    return [bytes(memory.view[item.at : item.at + item.size]) for item in items]


def blank(memory: Memory) -> None:
    memory.view[:] = bytes(len(memory.view))


@pytest.mark.parametrize("size", [64, 4160, 1 << 20])
async def test_values_come_back_as_they_were_stored(tier: Tier, memory: Memory, size: int) -> None:
    items = values(memory, size)
    before = bytes_of(memory, items)
    assert await tier.store(items) == [OK] * 3
    blank(memory)
    assert await tier.load(items) == [OK] * 3
    assert bytes_of(memory, items) == before


async def test_values_of_several_sizes_travel_in_one_call(tier: Tier, memory: Memory) -> None:
    items = [
        *values(memory, 100),
        *values(memory, 5000, first=1000),
        *values(memory, 77, 1, first=1 << 20),
    ]
    before = bytes_of(memory, items)
    assert await tier.store(items) == [OK] * 7
    blank(memory)
    assert await tier.load(items) == [OK] * 7
    assert bytes_of(memory, items) == before


async def test_of_each_key_it_is_known_whether_there_is_a_value(tier: Tier, memory: Memory) -> None:
    first, second, third = values(memory, 100)
    await tier.store([first, third])
    assert await tier.holds([first.key, second.key, third.key]) == [True, False, True]


async def test_what_is_missing_is_missing_and_the_rest_comes(tier: Tier, memory: Memory) -> None:
    items = values(memory, 5000)
    await tier.store([items[0], items[2]])
    assert await tier.load(items) == [OK, MISSING, OK]


async def test_a_value_of_another_size_is_not_loaded(tier: Tier, memory: Memory) -> None:
    (item,) = values(memory, 5000, 1)
    await tier.store([item])
    assert OK not in await tier.load([item._replace(size=4999)])
    assert OK not in await tier.load([item._replace(size=5001)])


async def test_a_value_may_be_stored_again(tier: Tier, memory: Memory) -> None:
    (item,) = values(memory, 300, 1)
    assert await tier.store([item]) == await tier.store([item]) == [OK]
    assert await tier.load([item]) == [OK]


async def test_a_dropped_value_is_missing_also_after_it_was_read(
    tier: Tier, memory: Memory
) -> None:
    items = values(memory, 300)
    await tier.store(items)
    await tier.load(items)
    await tier.drop([items[0].key, "kvrouter:test:never"])
    assert await tier.holds([item.key for item in items]) == [False, True, True]


async def test_many_calls_at_a_time_do_not_mix(tier: Tier, memory: Memory) -> None:
    batches = [values(memory, 4096, 16, first=k * (1 << 20)) for k in range(8)]
    before = [bytes_of(memory, items) for items in batches]
    assert await asyncio.gather(*map(tier.store, batches)) == [[OK] * 16] * 8
    blank(memory)
    assert await asyncio.gather(*map(tier.load, batches)) == [[OK] * 16] * 8
    assert [bytes_of(memory, items) for items in batches] == before


async def test_a_thousand_keys_are_one_call(tier: Tier, memory: Memory) -> None:
    items = values(memory, 100, 2)
    await tier.store(items)
    keys = [items[0].key, items[1].key, *(f"kvrouter:test:none:{k}" for k in range(998))]
    assert await tier.holds(keys) == [True, True, *[False] * 998]


async def test_it_can_be_stopped_and_started_again(tier: Tier, memory: Memory) -> None:
    (item,) = values(memory, 100, 1)
    await tier.store([item])
    await tier.stop()
    with pytest.raises(TierAway):
        await tier.holds([item.key])
    await tier.stop()
    await tier.start(memory)
    assert await tier.load([item]) == [OK]
