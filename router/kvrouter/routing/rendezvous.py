"""Engines of a session: highest random weight, with bounded loads. Pure.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998): an engine that
joins or leaves moves its own sessions alone. Mirrokni, Thorup and Zadimoghaddam, "Consistent
hashing with bounded loads" (2018): an engine with too much load passes sessions on to their next.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.engines.engine import Engine

BOUND: Final = 1.25
"""Of the mean load: an engine with more, and this request, takes none by session."""
LEAST_TOKENS: Final = 2048
"""Less than this above the bound makes no difference."""


def engine_of(session: bytes, candidates: Sequence[Engine], tokens: int) -> Engine:
    """The session's first engine that has room for a prompt of so many tokens."""
    limit = BOUND * sum(engine.tokens for engine in candidates) / len(candidates)
    limit += max(tokens, LEAST_TOKENS)
    able = [engine for engine in candidates if engine.tokens <= limit]
    return max(able, key=lambda engine: _weight(session, engine.address))


def _weight(session: bytes, address: str) -> bytes:
    return blake2b(address.encode() + b"\0" + session, digest_size=8).digest()
