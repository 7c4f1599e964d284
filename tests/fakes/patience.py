"""Waiting for what others do: here tests sleep, and hardly anywhere else."""

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

PATIENCE_S = 20.0
LOOK_S = 0.005


def eventually(
    condition: Callable[..., object], patience_s: float = PATIENCE_S, look_s: float = LOOK_S
) -> bool:
    """Whether the condition becomes true: for what another thread or process is about to do."""
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(look_s)
    return True


async def until(
    condition: Callable[..., Any],
    patience_s: float | None = PATIENCE_S,
    *,
    meanwhile: Callable[[], Any] | None = None,
    look_s: float = LOOK_S,
) -> Any:
    """What the condition returns as soon as that is true; both functions may be asynchronous.

    Args:
        condition: is asked again and again; it may have arguments with defaults.
        patience_s: how long, then this is a TimeoutError; None: until cancelled.
        meanwhile: is called each time when the condition is not true.
        look_s: the pause before the condition is asked again.
    """
    async with asyncio.timeout(patience_s):
        while not (found := await _result(condition)):
            if meanwhile is not None:
                await _result(meanwhile)
            await asyncio.sleep(look_s)
    return found


async def until_still(number: Callable[[], int], for_s: float = 0.1) -> int:
    """The number as soon as it is not 0 and has not changed for as long."""
    before = -1
    while before != (now := number()) or not now:
        before = now
        await asyncio.sleep(for_s)
    return now


async def every(period_s: float, act: Callable[[], Any]) -> None:
    """Act again and again, with a pause after each time, until cancelled."""
    while True:
        await _result(act)
        await asyncio.sleep(period_s)


async def taken() -> None:
    """Let the other end of a connection, on this event loop, take what was written.

    What is written next arrives apart.
    """
    for _ in range(10):
        await asyncio.sleep(0)


async def _result(function: Callable[[], Any]) -> Any:
    found = function()
    return await found if isawaitable(found) else found
