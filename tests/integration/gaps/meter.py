"""How long the event loop is kept from other work."""

import asyncio
import gc
import time
from typing import Self

MOST_S = 0.2  # nothing takes half of it alone; beside other tests a core computes half as fast
TICK_S = 0.001


class GapMeter:
    """The longest turn of the running loop, in seconds of its own thread's CPU.

    CPU, not time: other programs on the machine are not what is measured. Nor is what the tests
    left in memory: as in a router, the garbage collector looks at nothing that was there before.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        gc.freeze()
        self._last_s = time.thread_time()
        self._tick()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tick()
        assert self._timer is not None
        self._timer.cancel()
        gc.unfreeze()

    def _tick(self) -> None:
        now_s = time.thread_time()
        self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
