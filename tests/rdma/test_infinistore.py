"""InfiniStore as a tier, on Soft-RoCE: the suite of every tier, and a server that stalls.

Its client registers 512 MiB with the device when it connects, and the server as much for each
client. That takes an emulated machine many seconds, so tests share what is started.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from tests.fakes.infinistore import InfiniStore
from tests.integration.tiers.test_contract import *  # noqa: F403 - its tests run here
from tests.integration.tiers.test_contract import blank, bytes_of, values

from kvrouter_store.tiers.base import Memory, Tier, TierStatus
from kvrouter_store.tiers.registry import open_tier
from kvrouter_store.tiers.staging import Staging

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def memory() -> Iterator[Memory]:
    """Memory of a tier side."""
    staging = Staging(8 << 20)
    yield staging.memory
    staging.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")  # type: ignore[no-redef]
async def tier(infinistore: InfiniStore, memory: Memory) -> AsyncIterator[Tier]:
    """The tier, started."""
    opened = open_tier(infinistore.url)
    began = time.monotonic()
    await opened.start(memory)
    print(f"\nInfiniStore's client connected in {time.monotonic() - began:.1f} s")
    yield opened
    await opened.stop()


async def test_a_value_may_end_with_any_byte(tier: Tier, memory: Memory) -> None:
    items = values(memory, 64, 256)
    for last, item in enumerate(items):
        memory.view[item.at + 63] = last
    before = bytes_of(memory, items)
    await tier.store(items)
    blank(memory)
    assert await tier.load(items) == [TierStatus.OK] * 256
    assert bytes_of(memory, items) == before


async def test_what_a_stalled_server_writes_late_reaches_no_memory(
    infinistore: InfiniStore, tier: Tier, memory: Memory
) -> None:
    items = values(memory, 1 << 20, 2)
    await tier.store(items)
    infinistore.stall()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await tier.load(items)
    blank(memory)
    infinistore.resume()
    await tier.start(memory)
    assert await tier.holds([items[0].key]) == [True]
    assert memory.view == bytes(len(memory.view))
    await tier.stop()
