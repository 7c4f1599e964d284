"""Engines of a session: highest random weight, with bounded loads. Pure.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998): an engine that
joins or leaves moves its own sessions alone. Mirrokni, Thorup and Zadimoghaddam, "Consistent
hashing with bounded loads" (2018): an engine with too much load passes sessions on to their next.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrouter.engines.engine import Engine
    from kvrouter.routing.plan import RouteInputs

BOUND: Final = 1.25  # of the mean load: an engine with more takes no session that it has nothing of
LOOSE_BOUND: Final = 2.0
"""The same for prompts of which an engine may hold something: to compute them elsewhere costs."""
LEAST_TOKENS: Final = 2048  # an engine with less has room, whatever the others have
LEAST_PROMPTS: Final = 4  # the same of prompts that an engine may hold


def by_affinity(
    inputs: RouteInputs, candidates: Sequence[Engine], price: Callable[[Engine], float]
) -> Engine:
    """The cheapest engine; among equals, or where nobody has any of the prompt, the session's."""
    unknown, session = inputs.guesses.keys().isdisjoint(candidates), inputs.session
    if session is not None:
        candidates = in_order(session, candidates)
        if unknown:
            return with_room(candidates, BOUND)[0]
    return min(with_room(candidates, LOOSE_BOUND, LEAST_PROMPTS * inputs.prompt_tokens), key=price)


def with_room(
    candidates: Sequence[Engine], bound: float, least: int = LEAST_TOKENS
) -> Sequence[Engine]:
    """Those with at most `bound` times the mean load, or `least` tokens; never none."""
    mean = sum(engine.tokens for engine in candidates) / len(candidates)
    limit = max(bound * mean, least)
    return [engine for engine in candidates if engine.tokens <= limit]


def in_order(session: bytes, candidates: Sequence[Engine]) -> Sequence[Engine]:
    """The session's engine first, then the one that it has without that, and so on."""
    return sorted(candidates, key=lambda engine: weight(session, engine.address), reverse=True)


def weight(session: bytes, address: str) -> bytes:
    """Of an engine for a session: the largest wins."""
    return blake2b(address.encode() + b"\0" + session, digest_size=8).digest()
