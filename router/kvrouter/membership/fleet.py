"""Engines that come and go while the router runs: added, given another role, drained, forgotten.

Synchronous. It says what shall be; the pool lets what is under way end (or breaks it off, where
that was asked for), the prober finds out who is there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.engine import Engine, Role
    from kvrouter.engines.pool import EnginePool
    from kvrouter.membership.prober import Prober

log = logging.getLogger(__name__)


class Fleet:
    """Changes which engines there are.

    Args:
        pool: the engines.
        prober: watches each of them.
    """

    def __init__(self, pool: EnginePool, prober: Prober) -> None:
        self._pool = pool
        self._prober = prober
        pool.on_remove(self._removed)

    def add(self, address: str, role: Role) -> Engine:
        """The engine at `address` (`HOST:PORT`) may take the legs of `role`, once it has joined.

        One that is known gets this role; one that was draining stays.
        """
        known = self._pool.find(address)
        engine = self._pool.assign(address, role)
        if engine is not known:
            log.info("engine %s is added as %s", address, role)
            self._prober.watch(engine)
        return engine

    def remove(self, engine: Engine) -> bool:
        """Give `engine` no more legs and forget it when those under way have ended.

        Returns:
            whether it is gone already.
        """
        log.info("engine %s drains: %d legs are under way", engine.address, engine.requests)
        return self._pool.drain(engine)

    def cut(self, engine: Engine) -> int:
        """Forget `engine` now; returns how many legs were under way on it, all of which break off.

        What the client has seen nothing of, another engine does.
        """
        legs = engine.requests
        log.info("engine %s is removed at once: %d legs are cut off", engine.address, legs)
        self._pool.remove(engine)
        return legs

    def follow(self, before: Mapping[str, Role], after: Mapping[str, Role]) -> None:
        """Bring the engines from one list (roles by address) to another.

        Engines that neither list names stay as they are: they were added otherwise.
        """
        for address in before.keys() - after.keys():
            engine = self._pool.find(address)
            if engine is not None and not engine.draining:
                self.remove(engine)
        for address, role in after.items():
            engine = self._pool.find(address)
            if engine is None or engine.draining or before.get(address) is not role:
                self.add(address, role)

    def _removed(self, engine: Engine) -> None:
        log.info("engine %s is removed", engine.address)
        self._prober.forget(engine)
