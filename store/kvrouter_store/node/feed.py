"""What the followers of a node's feed share."""

import asyncio

MOST_CHANGES = 1 << 16
"""Changes that may wait for a follower. After more, it has all that the node holds told again."""


async def readable(descriptor: int) -> None:
    """Wait until there is something to read."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
