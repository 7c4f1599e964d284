"""Engines that come and go while the router runs: added, given another role, drained, removed.

Synchronous. The pool ends what is in flight, and the prober watches the engines.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvrouter.options.addresses import bare_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.engine import Engine, Role
    from kvrouter.engines.pool import EnginePool
    from kvrouter.membership.prober import Prober

MAX_ENGINES: Final = 4096
"""Of all sources together; more are a mistake or an attack, and would only cost probes."""

log = logging.getLogger(__name__)


class FleetFull(Exception):
    """There are MAX_ENGINES already."""


class Fleet:
    """Changes which engines there are, in `pool` and for `prober`."""

    def __init__(self, pool: EnginePool, prober: Prober) -> None:
        self.refused = 0  # how many engines were not added because there were MAX_ENGINES
        self._pool = pool
        self._prober = prober
        self._told = False  # that it is full
        pool.on_remove(self._removed)

    def add(self, address: str, role: Role) -> Engine:
        """Give the engine at `address` (`HOST:PORT`) exactly this role; it drains no longer.

        FleetFull: it would be one too many.
        """
        known = self._pool.find(address)
        if known is None and len(self._pool.all()) >= MAX_ENGINES:
            self._refuse(address)
            raise FleetFull
        engine = self._pool.assign(address, role)
        if engine is not known:
            log.info("engine %s is added as %s", address, role)
            self._prober.watch(engine)
        return engine

    def remove(self, engine: Engine) -> bool:
        """Drain `engine`: it is removed after its last leg. Returns whether it is gone already."""
        log.info("engine %s drains: %d legs are in flight", engine.address, engine.requests)
        return self._pool.drain(engine)

    def cut(self, engine: Engine) -> int:
        """Remove `engine` now; returns how many legs were in flight, all of which are cut off.

        Another engine serves those whose client has seen nothing yet.
        """
        legs = engine.requests
        log.info("engine %s is removed at once: %d legs are cut off", engine.address, legs)
        self._pool.remove(engine)
        return legs

    def follow(self, before: Mapping[str, Role], after: Mapping[str, Role]) -> set[str]:
        """Replace one list of engines (roles by address) by another; returns which did not fit.

        Engines in neither list stay as they are: they were added otherwise.
        """
        refused = set()
        kept = {bare_address(address) for address in after}
        for address in before.keys() - after.keys():
            engine = self._pool.find(address)
            if engine is not None and not engine.draining and engine.address not in kept:
                self.remove(engine)
        for address, role in after.items():
            engine = self._pool.find(address)
            if engine is None or engine.draining or before.get(address) is not role:
                try:
                    self.add(address, role)
                except FleetFull:
                    refused.add(address)
        return refused

    def _refuse(self, address: str) -> None:
        self.refused += 1
        if not self._told:
            self._told = True
            log.warning(
                "engine %s and others are not added: there are %d, which is the most; look at what "
                "the sources of discovery and other routers name",
                *(address, MAX_ENGINES),
            )

    def _removed(self, engine: Engine) -> None:
        log.info("engine %s is removed", engine.address)
        self._told &= len(self._pool.all()) > MAX_ENGINES // 2
        self._prober.forget(engine)
