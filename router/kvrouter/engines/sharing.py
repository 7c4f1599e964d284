"""Which prefill engines' KV which decode engines can load, and why not: told in log and metrics.

It only tells. `compatibility.partners` keeps engines apart that cannot share.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvrouter.engines.compatibility import shares
from kvrouter.engines.engine import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool

log = logging.getLogger(__name__)


class Sharing:
    """Compares each engine that joins the pool with those that are there.

    Args:
        pool: the engines.
        difference: says in a few words what differs between two manifests (hex digests); None:
            nobody knows more than their digests.
    """

    def __init__(
        self, pool: EnginePool, difference: Callable[[str, str], str] | None = None
    ) -> None:
        self._pool = pool
        self._difference = difference or _manifests_differ

    def engine_joined(self, engine: Engine) -> None:
        """Log every engine with which it could share KV by its role, but does not."""
        if engine.rank:
            return  # what holds for one rank of an engine holds for all: the first has told
        engine = engine.server
        identity = engine.identity
        if identity is not None and identity.refusal is not None:
            log.warning("engine %s shares no KV: %s", engine.address, identity.refusal)
            return
        for prefill, decode, reason in self.refused():
            if engine in (prefill, decode):
                log.warning(
                    "engines %s and %s share no KV, prompts of the latter are not prefilled on the "
                    "former: %s",
                    prefill.address,
                    decode.address,
                    reason,
                )

    def refused(self) -> Iterator[tuple[Engine, Engine, str]]:
        """Pairs of a prefill and a decode engine that share no KV, and why."""
        here = [e for e in self._pool.all() if e.identity is not None and e.identity.generates]
        for prefill in here:
            for decode in here:
                able = prefill.role.serves(Role.PREFILL) and decode.role.serves(Role.DECODE)
                if able and prefill is not decode and not shares(prefill, decode):
                    yield prefill, decode, self._reason(prefill, decode)

    def _reason(self, prefill: Engine, decode: Engine) -> str:
        for engine in (prefill, decode):
            if engine.identity is not None and engine.identity.refusal is not None:
                return f"{engine.address}: {engine.identity.refusal}"
        if prefill.family != decode.family:
            return f"the one is of family {prefill.family}, the other of {decode.family}"
        for engine in (prefill, decode):
            if engine.identity is not None and not engine.identity.can_split:
                return f"{engine.address} answers only whole requests ({engine.family})"
        return self._difference(prefill.manifest or "", decode.manifest or "")


def _manifests_differ(one: str, other: str) -> str:
    return f"manifests {one[:12]} and {other[:12]}"
