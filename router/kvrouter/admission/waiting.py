"""Waits of requests: for their turn, and for an engine while none is available.

Both are bounded in number and time. A client that leaves gives up its place at once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from sys import maxsize
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

from kvrouter.admission.queue import Admission, Turn, Waiting
from kvrouter.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.admission.queue import Work
    from kvrouter.admission.tenants import Tenants
    from kvrouter.engines.engine import Engine
    from kvrouter.telemetry.metrics import Metrics

T = TypeVar("T")

_LOOK_S: Final = 0.05
"""Between two looks for an engine: a breaker may have closed, which no event reports."""


@dataclass(eq=False, kw_only=True)
class QueueWait(Admission):
    """An `Admission` in which requests await their turn, for at most `timeout_s`."""

    timeout_s: float
    tenants: Tenants
    metrics: Metrics

    def __post_init__(self) -> None:
        self.tenant = self.tenants.of

    async def turn(self, tenant: str, priority: int, work: Work, model: str = "") -> Waiting:
        """Wait until a request may begin; its owner must then call `correct` and `leave`.

        It counts as waiting for `model`; "": which one is unknown.

        ApiError: 429: the queue is full; 503: its turn did not come in time.
        """
        turned = asyncio.Event()
        waiting = self.join(tenant, priority, work, turned.set)
        if waiting is None:
            raise self._full()
        counts = self.metrics.of(model)
        counts.waiting += 1
        try:
            async with asyncio.timeout(self.timeout_s):
                await turned.wait()
        except TimeoutError:
            if waiting.turn is Turn.WAITING:
                raise ApiError(
                    503,
                    f"The request waited {self.timeout_s:g} s for others to end.",
                    retry_after_s=self.retry_after_s,
                ) from None
        except asyncio.CancelledError:
            if waiting.turn is Turn.ADMITTED:  # at the moment when its client left
                self.refund(waiting)
                self.leave()
            raise
        finally:
            counts.waiting -= 1
            self.withdraw(waiting)
        counts.queue.observe(self.waited_s(waiting))
        if waiting.turn is Turn.PUSHED_OUT:
            raise self._full()
        return waiting

    def _full(self) -> ApiError:
        return ApiError(
            429,
            "Too many requests are in flight, and the queue is full.",
            retry_after_s=self.retry_after_s,
        )


class ModelGates:
    """A queue beside the fleet's for each name with a limit.

    A request passes it first: while it waits for others of its model, it takes no place that
    another model could use.

    Args:
        fleet: the queue of all requests; the others get its settings.
        limits: requests in flight at a time, by name of a model or alias.
    """

    def __init__(self, fleet: QueueWait, limits: Mapping[str, int]) -> None:
        self._fleet = fleet
        self._gates: dict[str, QueueWait] = {}
        self.follow(limits)

    def __len__(self) -> int:
        """Names with a limit."""
        return len(self._gates)

    @property
    def waiting(self) -> int:
        """Requests that wait for others of their model to end."""
        return sum(gate.waiting for gate in self._gates.values())

    def of(self, model: str, alias: str | None) -> list[QueueWait]:
        """Those that a request passes: while it waits for its model, it has a place of the alias.

        The other way round it would keep a place from requests for the model itself.
        """
        names = (model,) if alias in (None, model) else (alias, model)
        return [self._gates[name] for name in names if name in self._gates]

    def follow(self, limits: Mapping[str, int]) -> None:
        """Take over the limits and the fleet's settings; requests in flight or in a queue stay."""
        before, fleet = self._gates, self._fleet
        self._gates = {n: before.get(n) or replace(fleet, limit=limits[n]) for n in limits}
        for name, gate in (before | self._gates).items():
            gate.timeout_s = fleet.timeout_s
            gate.resize(limits.get(name, maxsize), fleet.queue_size)


@dataclass(eq=False)
class EngineWait:
    """Lets at most `size` requests wait for an engine, each for at most `timeout_s`."""

    timeout_s: float
    size: int
    metrics: Metrics

    def __post_init__(self) -> None:
        self._joined = asyncio.Event()
        self.waiting = 0

    def engine_joined(self, engine: Engine) -> None:
        """Let all waiting requests look again."""
        del engine
        joined, self._joined = self._joined, asyncio.Event()
        joined.set()

    async def until(self, look: Callable[[], T], model: str = "") -> T:
        """The first true result of `look`, or its last result after `timeout_s`.

        Args:
            look: called at once, and whenever an engine may have become available.
            model: for which the request waits; "": which one is unknown.
        """
        found = look()
        if found or self.waiting >= self.size:
            return found
        end_s = monotonic() + self.timeout_s
        counts = self.metrics.of(model)
        self.waiting += 1
        counts.waiting += 1
        try:
            while not found and (left_s := end_s - monotonic()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, _LOOK_S)):
                        await self._joined.wait()
                found = look()
        finally:
            self.waiting -= 1
            counts.waiting -= 1
        return found
