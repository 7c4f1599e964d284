"""Nobody has a chunk before its last user has ended."""

import asyncio
import threading
from contextlib import AsyncExitStack

import pytest

from kvrouter_store.tiers.base import Memory, complete
from kvrouter_store.tiers.staging import CHUNKS, Staging

MIB = 1 << 20


async def test_chunks_do_not_overlap_and_have_the_size_asked_for() -> None:
    staging = Staging(MIB)
    async with AsyncExitStack() as stack:
        places = [await stack.enter_async_context(staging.chunk()) for _ in range(CHUNKS)]
    assert sorted(places) == [k * staging.chunk_bytes for k in range(CHUNKS)]
    assert len(staging.memory.view) == CHUNKS * staging.chunk_bytes == MIB
    staging.close()


async def test_a_chunk_waits_for_one_that_is_given_back() -> None:
    staging, order = Staging(MIB), []

    async def late() -> None:
        async with staging.chunk():
            order.append("taken")

    async with AsyncExitStack() as stack:
        for _ in range(CHUNKS):
            await stack.enter_async_context(staging.chunk())
        waiting = asyncio.create_task(late())
        await asyncio.sleep(0)
        order.append("given back")
    await waiting
    assert order == ["given back", "taken"]
    staging.close()


async def test_another_mapping_of_the_descriptor_is_the_same_memory() -> None:
    staging = Staging(MIB)
    staging.memory.view[5:8] = b"kvs"
    assert bytes(Memory.of(staging.memory.fd).view[5:8]) == b"kvs"
    staging.close()


async def test_a_cancelled_call_keeps_its_chunk_until_its_thread_has_returned() -> None:
    staging = Staging(MIB)
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang(at: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        staging.memory.view[at] = 1

    async def call() -> None:
        async with staging.chunk() as at:
            await complete(asyncio.to_thread(hang, at))

    calls = [asyncio.create_task(call()) for _ in range(CHUNKS)]
    await begun.wait()
    for each in calls:
        each.cancel()
        each.cancel()
    taken = asyncio.create_task(anext_chunk(staging))
    done, _ = await asyncio.wait({taken, *calls}, timeout=0.05)
    assert not done
    go_on.set()
    await taken
    for each in calls:
        with pytest.raises(asyncio.CancelledError):
            await each
    staging.close()


async def anext_chunk(staging: Staging) -> int:
    async with staging.chunk() as at:
        return at


async def test_completion_passes_on_results_and_errors() -> None:
    assert await complete(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ZeroDivisionError):
        await complete(asyncio.to_thread(lambda: 1 // 0))
