"""Engines in turn, whatever their load and caches: the baseline for other policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvrouter.routing.policies.base import decide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.engines.engine import Engine
    from kvrouter.routing.plan import Plan, RouteInputs


class RoundRobin:
    """Each leg goes to the next candidate."""

    name: ClassVar[str] = "round_robin"
    summary: ClassVar[str] = "in turn"
    needs_hashes: ClassVar[bool] = False

    def __init__(self) -> None:
        self._prefills = 0
        self._decodes = 0

    def plan(self, inputs: RouteInputs) -> Plan:
        """The next engine of each role."""
        decode = inputs.decode[self._decodes % len(inputs.decode)]
        self._decodes += 1
        return decide(inputs, decode, self._next_prefill)

    def rebind(
        self, inputs: RouteInputs, decode: Sequence[Engine], bound: Engine, own_tokens: int
    ) -> Engine:
        """The bound one; the next one if that is gone."""
        if bound in decode:
            return bound
        self._decodes += 1
        return decode[(self._decodes - 1) % len(decode)]

    def _next_prefill(self, candidates: Sequence[Engine]) -> Engine:
        self._prefills += 1
        return candidates[(self._prefills - 1) % len(candidates)]
