"""Which engines can load each other's KV, and why others cannot."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrouter.engines.engine import Engine, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvrouter.engines.pool import EnginePool

log = logging.getLogger(__name__)


def shares(prefill: Engine, decode: Engine) -> bool:
    """Whether `decode` can load KV of `prefill`: one family, and no manifests that differ."""
    if prefill.family != decode.family:
        return False
    mine, theirs = prefill.identity, decode.identity
    if mine is None or theirs is None:
        return True
    if not (mine.can_split and theirs.can_split):
        return False
    if mine.refusal is not None or theirs.refusal is not None:
        return False
    return mine.manifest == theirs.manifest or None in (mine.manifest, theirs.manifest)


def partners(
    prefill: Sequence[Engine], decode: Engine, model: str | None = None
) -> Sequence[Engine]:
    """Prefill engines on other servers whose KV of `model` the engine `decode` can load now."""
    server, adapter = decode.server, _adapter(decode, model)
    able = [
        e
        for e in prefill
        if e.server is not server and shares(e, decode) and _adapter(e, model) == adapter
    ]
    if decode.pairs:
        able = [e for e in able if e not in decode.pairs or decode.pairs[e].allows()]
    return prefill if len(able) == len(prefill) else able


def on_other_servers(engines: Sequence[Engine], failed: Iterable[Engine]) -> Sequence[Engine]:
    """Those of `engines` on other servers than `failed`, or all of them if there are none.

    Ranks of one server often fail together.
    """
    servers = {engine.server for engine in failed}
    return [engine for engine in engines if engine.server not in servers] or engines


def _have_a_model_in_common(prefill: Engine, decode: Engine) -> bool:
    mine, theirs = prefill.identity, decode.identity
    return mine is None or theirs is None or not set(mine.models).isdisjoint(theirs.models)


def _adapter(engine: Engine, model: str | None) -> tuple[str, str] | None:
    """Name and path of the adapter that `engine` serves as `model`; None: no adapter.

    Engines do not compare adapters when they hand KV over. While an adapter is replaced on one
    engine after the other, one name stands for two paths, and the KV would be wrong.
    """
    identity = engine.identity
    if model is None or identity is None or not identity.adapters:
        return None
    return identity.adapter(model)


def digests_differ(one: str, other: str) -> str:
    """How two manifests differ, if only their digests are known."""
    return f"manifests {one[:12]} and {other[:12]}"


@dataclass(eq=False)
class CompatibilityMonitor:
    """Reports pairs of engines that share no KV, in the log and for metrics. Decides nothing.

    `difference` describes how two manifests (hex digests) differ.
    """

    pool: EnginePool
    difference: Callable[[str, str], str] = digests_differ

    def engine_joined(self, engine: Engine) -> None:
        """Log every engine that could share KV with `engine` by its role, but does not."""
        if engine.rank:
            return  # all ranks of an engine are alike; the first one was reported
        engine = engine.server
        identity = engine.identity
        if identity is not None and identity.refusal is not None:
            log.warning("engine %s shares no KV: %s", engine.address, identity.refusal)
            return
        for prefill, decode, reason in self.incompatible():
            if engine in (prefill, decode):
                log.warning(
                    "engines %s and %s share no KV, prompts of the latter are not prefilled on the "
                    "former: %s",
                    prefill.address,
                    decode.address,
                    reason,
                )

    def incompatible(self) -> Iterator[tuple[Engine, Engine, str]]:
        """Pairs of a prefill and a decode engine of one model that share no KV, and the reason."""
        here = [e for e in self.pool.all() if e.identity is not None and e.identity.generates]
        for prefill in here:
            for decode in here:
                able = prefill.role.serves(Role.PREFILL) and decode.role.serves(Role.DECODE)
                able = able and _have_a_model_in_common(prefill, decode)
                if able and prefill is not decode and not shares(prefill, decode):
                    yield prefill, decode, self._reason(prefill, decode)

    def _reason(self, prefill: Engine, decode: Engine) -> str:
        for engine in (prefill, decode):
            if engine.identity is not None and engine.identity.refusal is not None:
                return f"{engine.address}: {engine.identity.refusal}"
        if prefill.family != decode.family:
            return f"the families differ: {prefill.family} and {decode.family}"
        for engine in (prefill, decode):
            if engine.identity is not None and not engine.identity.can_split:
                return f"{engine.address} answers only whole requests ({engine.family})"
        return self.difference(prefill.manifest or "", decode.manifest or "")
