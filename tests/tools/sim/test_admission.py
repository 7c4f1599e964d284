"""Which requests run and which wait; a cancelled request frees its slots."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvrouter.errors import ApiError
from kvrouter.tools.sim.block_cache import BlockCache
from kvrouter.tools.sim.engine import SimAdmission
from kvrouter.tools.sim.store_link import in_thread


async def settled() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_are_admitted_in_the_order_in_which_they_came() -> None:
    admission = SimAdmission(BlockCache(4), max_running=1, max_waiting=9)
    first = await admission.enter([], 1)
    order: list[int] = []

    async def enter(number: int) -> None:
        allocation = await admission.enter([], 1)
        order.append(number)
        admission.leave(allocation)

    tasks = [asyncio.create_task(enter(number)) for number in range(3)]
    await settled()
    assert (admission.running, admission.waiting, order) == (1, 3, [])
    admission.leave(first)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert (admission.running, admission.waiting) == (0, 0)


async def test_of_those_that_wait_the_lowest_priority_is_next_and_of_equals_the_first() -> None:
    admission = SimAdmission(BlockCache(4), max_running=1, max_waiting=9)
    holder = await admission.enter([], 1)
    order: list[tuple[int, int]] = []

    async def enter(number: int, priority: int) -> None:
        allocation = await admission.enter([], 1, priority)
        order.append((priority, number))
        admission.leave(allocation)

    tasks = [
        asyncio.create_task(enter(number, priority))
        for number, priority in enumerate([5, 0, -1, 5, 0])
    ]
    await settled()
    admission.leave(holder)
    await asyncio.gather(*tasks)
    assert order == [(-1, 2), (0, 1), (0, 4), (5, 0), (5, 3)]


async def test_a_small_request_does_not_overtake_a_large_one() -> None:
    admission = SimAdmission(BlockCache(4), max_running=9, max_waiting=9)
    holder = await admission.enter([], 2)
    large = asyncio.create_task(admission.enter([], 4))
    await settled()
    small = asyncio.create_task(admission.enter([], 1))
    await settled()
    assert not small.done()
    admission.leave(holder)
    admission.leave(await large)
    admission.leave(await small)
    assert admission.running == 0


async def test_one_too_many_is_turned_away_at_once() -> None:
    admission = SimAdmission(BlockCache(4), max_running=1, max_waiting=0)
    holder = await admission.enter([], 1)
    with pytest.raises(ApiError, match="Too many"):
        await admission.enter([], 1)
    admission.leave(holder)
    admission.leave(await admission.enter([], 1))


async def test_a_waiter_that_leaves_lets_the_next_one_in() -> None:
    admission = SimAdmission(BlockCache(4), max_running=9, max_waiting=9)
    holder = await admission.enter([], 2)
    large = asyncio.create_task(admission.enter([], 4))
    await settled()
    small = asyncio.create_task(admission.enter([], 1))
    await settled()
    large.cancel()
    admission.leave(await small)
    admission.leave(holder)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_waiter_cancelled_just_as_it_is_admitted_gives_its_slots_back() -> None:
    cache = BlockCache(2)
    admission = SimAdmission(cache, max_running=1, max_waiting=9)
    holder = await admission.enter([], 1)
    waiting = asyncio.create_task(admission.enter([], 1))
    await settled()
    admission.leave(holder)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (admission.running, cache.held_blocks) == (0, 0)


async def test_a_cancelled_waiter_is_passed_over() -> None:
    admission = SimAdmission(BlockCache(2), max_running=1, max_waiting=9)
    holder = await admission.enter([], 1)
    waiting = asyncio.create_task(admission.enter([], 1))
    await settled()
    waiting.cancel()
    admission.leave(holder)
    await settled()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_cancelled_work_in_a_thread_is_waited_for_before_its_memory_is_free() -> None:
    began, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        began.set()
        go_on.wait(10)
        over.set()

    with ThreadPoolExecutor(1) as executor:
        task = asyncio.create_task(in_thread(executor, copy))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        await settled()
        assert not task.done()
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert over.is_set()


async def test_what_fails_in_a_thread_after_its_caller_left_is_no_unhandled_error() -> None:
    began, go_on = threading.Event(), threading.Event()
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    def fail() -> None:
        began.set()
        go_on.wait(10)
        raise OSError("gone")

    with ThreadPoolExecutor(1) as executor:
        task = asyncio.create_task(in_thread(executor, fail))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        await settled()
        go_on.set()
        await asyncio.wait({task})
    assert task.cancelled()
    del task
    gc.collect()
    assert unhandled == []
