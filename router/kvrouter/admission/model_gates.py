"""Bounds of requests in flight for models and aliases that have a limit of their own."""

from __future__ import annotations

from sys import maxsize
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.admission.waiting import QueueWait


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
        self._gates = {name: before.get(name) or fleet.alike(limits[name]) for name in limits}
        for name, gate in (before | self._gates).items():
            gate.timeout_s = fleet.timeout_s
            gate.resize(limits.get(name, maxsize), fleet.queue_size)
