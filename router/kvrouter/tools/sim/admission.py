"""Which requests of a simulated engine run, which wait, and which is next. No clock."""

import asyncio
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvrouter.errors import ApiError
from kvrouter.tools.sim.block_cache import Allocation, BlockCache


class QueueFull(ApiError):
    """429: the longest queue is reached."""

    def __init__(self) -> None:
        message, kind = "Too many requests wait.", "TooManyRequestsError"
        super().__init__(429, message, kind=kind, retry_after_s=1)


@dataclass(eq=False)
class _Waiter:
    hashes: Sequence[bytes]
    blocks: int
    admitted: asyncio.Future[Allocation]
    priority: int


@dataclass(eq=False)
class SimAdmission:
    """Hands out the slots of a cache to at most `max_running` requests at a time."""

    cache: BlockCache
    max_running: int
    max_waiting: int

    def __post_init__(self) -> None:
        self._waiters: list[_Waiter] = []
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiters)

    async def enter(self, hashes: Sequence[bytes], blocks: int, priority: int = 0) -> Allocation:
        """The slots of a request, once there is room; pair it with `leave`.

        The lowest `priority` is next, and of equals the oldest. Raises QueueFull at once if too
        many wait. A cancelled caller leaves the queue.
        """
        admitted = asyncio.get_running_loop().create_future()
        waiter = _Waiter(hashes, blocks, admitted, priority)
        insort(self._waiters, waiter, key=attrgetter("priority"))
        self._pump()
        if not admitted.done() and len(self._waiters) > self.max_waiting:
            self._waiters.remove(waiter)
            raise QueueFull()
        try:
            return await waiter.admitted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._pump()
            elif waiter.admitted.done() and not waiter.admitted.cancelled():
                self.leave(waiter.admitted.result())
            raise

    def leave(self, allocation: Allocation) -> None:
        """End a request: its slots are free for the next ones."""
        self.cache.release(allocation)
        self.running -= 1
        self._pump()

    def _pump(self) -> None:
        while self._waiters and self.running < self.max_running:
            head = self._waiters[0]
            if not head.admitted.cancelled():
                allocation = self.cache.allocate(head.hashes, head.blocks)
                if allocation is None:
                    return
                self.running += 1
                head.admitted.set_result(allocation)
            del self._waiters[0]
