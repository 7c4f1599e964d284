"""One tier with a deadline for each call, and a circuit that is open while the tier is away.

When a call is not answered, the circuit opens: the tier is stopped, and started again in the
background, with growing pauses. Until that works, calls find nothing: no request waits for a tier
that is away.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from kvrouter_store.connection.reconnect import BackOff
from kvrouter_store.tiers.base import Item, Memory, Tier, TierAway, TierStatus, complete

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
START_S = 30.0
"""How long a start may take: a process, its libraries, and the first answer."""
MOST_CALLS = 64
"""Calls at a time; further ones are refused."""
MOST_KEYS = 256
"""To ask for in one call, which has one deadline: InfiniStore looks for one after the other."""
FALSIFIED_S = 60.0
"""For which a falsified value counts as missing, also where the tier does not drop it."""
MOST_FALSIFIED = 4096
REFUSED_PAUSE_S = 60.0
"""Least time between two lines about values that a tier does not take."""
Operation = Literal["holds", "load", "store", "drop"]
T = TypeVar("T")
log = logging.getLogger(__name__)


class Guard:
    """Raises nothing: what a tier does not answer counts as missing or failed. One event loop.

    changed: is called with `up` each time that it has changed.

    Attributes:
        up: whether the circuit is closed.
        values: counts of values, by operation and outcome.
        moved: bytes of values, by operation.
    """

    def __init__(
        self,
        tier: Tier,
        memory: Memory,
        timeout_s: float,
        *,
        changed: Callable[[bool], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = tier.name
        self.up = False
        self.values: Counter[tuple[Operation, str]] = Counter()
        self.moved: Counter[Operation] = Counter()
        self._tier = tier
        self._memory = memory
        self._timeout_s = timeout_s
        self._changed = changed
        self._clock = clock
        self._sleep = sleep
        self._opened = asyncio.Event()
        self._inside = 0
        self._away_for = ""  # as the log has it
        self._refused, self._refused_said_at = 0, -math.inf
        self._falsified: dict[str, float] = {}  # when that was found

    async def keep(self) -> None:
        """Start the tier, and again whenever its circuit has opened. Until cancelled: stop it."""
        pause = BackOff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while True:
                if await self._start():
                    since = self._clock()
                    await self._opened.wait()
                    if self._clock() - since > LONGEST_PAUSE_S:
                        pause.succeeded()
                await complete(self._tier.stop())
                now = self._clock()
                pause.failed(now)
                await self._sleep(pause.remaining_s(now))
        finally:
            if self.up:
                self.up = False
                self._changed(False)
            await complete(self._tier.stop())

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        """Of each key, whether the tier has a value."""
        nothing = [False] * len(keys)
        held = await self._call("holds", len(keys), lambda: self._tier.holds(keys), nothing)
        if held is not nothing:
            if self._falsified:
                since = self._clock() - FALSIFIED_S
                known = [self._falsified.get(key, -math.inf) > since for key in keys]
                held = [there and not wrong for there, wrong in zip(held, known, strict=True)]
            self.values["holds", "ok"] += sum(held)
            self.values["holds", "missing"] += len(held) - sum(held)
        return held

    async def load(self, items: Sequence[Item]) -> list[TierStatus]:
        """Get values."""
        return await self._move("load", items, lambda: self._tier.load(items))

    async def store(self, items: Sequence[Item]) -> list[TierStatus]:
        """Put values."""
        for item in items:
            self._falsified.pop(item.key, None)
        return await self._move("store", items, lambda: self._tier.store(items))

    async def drop_falsified(self, keys: Sequence[str]) -> None:
        """Forget values that are not what was stored."""
        log.warning("%s: %d values are not what was stored; they are dropped", self.name, len(keys))
        self.values["load", "falsified"] += len(keys)
        self._falsified |= dict.fromkeys(keys, self._clock())
        for key in list(self._falsified)[:-MOST_FALSIFIED]:
            del self._falsified[key]
        await self._call("drop", len(keys), lambda: self._tier.drop(keys), None)

    async def _start(self) -> bool:
        try:
            async with asyncio.timeout(START_S):
                await self._tier.start(self._memory)
        except Exception as error:
            self._say_away(error)
            return False
        self._opened.clear()
        self.up, self._away_for = True, ""
        log.info("%s is there", self.name)
        self._changed(True)
        return True

    def _open(self, error: Exception) -> None:
        if self.up:
            self.up = False
            self._opened.set()
            self._say_away(error)
            self._changed(False)

    def _say_away(self, error: Exception) -> None:
        """Once for each reason in turn, not at every try."""
        why = _why(error)
        if why != self._away_for:
            self._away_for = why
            log.warning("%s is away: %s; requests go on without it", self.name, why)

    def _say_refused(self, values: int) -> None:
        self._refused += values
        now = self._clock()
        if now - self._refused_said_at < REFUSED_PAUSE_S:
            return
        log.warning(
            "%s did not store %d values, although it answers: if it is full, give it more memory "
            "or let it evict (Redis: maxmemory-policy)",
            self.name,
            self._refused,
        )
        self._refused, self._refused_said_at = 0, now

    async def _move(
        self,
        operation: Operation,
        items: Sequence[Item],
        call: Callable[[], Awaitable[list[TierStatus]]],
    ) -> list[TierStatus]:
        nothing = [TierStatus.FAILED] * len(items)
        statuses = await self._call(operation, len(items), call, nothing)
        if statuses is not nothing:
            for item, status in zip(items, statuses, strict=True):
                if status is not TierStatus.FALSIFIED:  # counted when it is dropped
                    self.values[operation, status.value] += 1
                if status is TierStatus.OK:
                    self.moved[operation] += item.size
            if operation == "store" and TierStatus.FAILED in statuses:
                self._say_refused(statuses.count(TierStatus.FAILED))
        return statuses

    async def _call(
        self, operation: Operation, values: int, call: Callable[[], Awaitable[T]], nothing: T
    ) -> T:
        """The result, or `nothing`. A foreign client may raise anything."""
        if not self.up or self._inside >= MOST_CALLS:
            self.values[operation, "skipped"] += values
            return nothing
        self._inside += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call()
        except Exception as error:
            self.values[operation, "failed"] += values
            self._open(error)
            return nothing
        finally:
            self._inside -= 1


def _why(error: Exception) -> str:
    if isinstance(error, TierAway):
        return str(error).rstrip(".")
    return "no answer in time" if isinstance(error, TimeoutError) else repr(error)
