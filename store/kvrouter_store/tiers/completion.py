"""Waiting for what must not be left alone."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def complete(awaitable: Awaitable[T]) -> T:
    """The result of what may use memory until it ends: a cancellation waits for that end too."""
    work = asyncio.ensure_future(awaitable)
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        work.exception()  # nobody else looks at it
        raise asyncio.CancelledError
    return work.result()
