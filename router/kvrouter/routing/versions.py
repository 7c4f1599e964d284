"""Which version of a model serves a session: highest random weight. Pure.

Each version draws a number from the session's name, as often the lowest as its weight says
(Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006). So a change of weights
moves only the sessions whose share changed, and the sessions of a version that is away are shared
by the others until it is back.
"""

from __future__ import annotations

from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_BYTES: Final = 6
"""Of a drawn number: a float is exact with that many."""


def version_of(session: bytes, weights: Mapping[str, float]) -> str:
    """The version that serves `session`; `weights` are positive, and not empty."""
    return min(weights, key=lambda model: _drawn(session, model) / weights[model])


def _drawn(session: bytes, model: str) -> float:
    """A number above 0, exponentially distributed."""
    digest = blake2b(model.encode() + b"\0" + session, digest_size=_BYTES).digest()
    return -log((int.from_bytes(digest) + 0.5) / 256**_BYTES)
