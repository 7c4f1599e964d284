"""Which engines can load each other's KV. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvrouter.engines.engine import Engine


def shares(prefill: Engine, decode: Engine) -> bool:
    """Whether KV of `prefill` is KV to `decode`: one family, and equal manifests or unknown ones.

    An engine whose connector refuses to share does so with nobody.
    """
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
    """Those prefill engines of other servers whose KV of `model` `decode` can load."""
    server, adapter = decode.server, _adapter(decode, model)
    able = [
        e
        for e in prefill
        if e.server is not server and shares(e, decode) and _adapter(e, model) == adapter
    ]
    return prefill if len(able) == len(prefill) else able


def on_other_servers(engines: Sequence[Engine], failed: Iterable[Engine]) -> Sequence[Engine]:
    """Those of `engines` on other servers than `failed`; all of them where there are none.

    Ranks of one server often fail together.
    """
    servers = {engine.server for engine in failed}
    return [engine for engine in engines if engine.server not in servers] or engines


def _adapter(engine: Engine, model: str | None) -> tuple[str, str] | None:
    """Name and path of the adapter that `engine` has under the name of `model`, if it is one.

    Engines do not compare adapters when they hand KV over: where one name stands for two paths, as
    while an adapter is replaced on one engine after the other, the KV would be another adapter's.
    """
    identity = engine.identity
    if model is None or identity is None or not identity.adapters:
        return None
    return identity.adapter(model)
