"""Splits a prompt's tokens by their fates. Blocks form chains, so all that is known are lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvrouter.fates.fate import Fate

if TYPE_CHECKING:
    from collections.abc import Iterable

    Fates = dict[Fate, int]  # tokens by fate; those without tokens are absent


class Evidence(Struct, kw_only=True, omit_defaults=True, gc=False):
    """What is known of one prompt when its request has ended. All lengths are leading tokens.

    The engine is the one that computed the prompt: of the prefill leg, else of the decode leg.
    """

    prompt: int  # all tokens
    by_prefill: bool = False  # whether a prefill leg computed it
    block: int = 0  # tokens of a block; 0: unknown
    cached: int | None = None  # not computed, according to the engine; None: it does not say
    loaded: int | None = None  # not computed by decode after a prefill leg; None: no leg, or unsaid
    held: int | None = None  # of those, in the engine's own cache; None: it does not say
    own: int = 0  # in the engine's cache at the plan, by its events or else probably
    sure: bool = True  # whether that is by its events
    lower: int = 0  # there or in its host memory or storage
    node: int = 0  # in its node of the store
    store: int = 0  # in any node of the store
    elsewhere: int = 0  # in the cache of another engine
    coming: int = 0  # what legs in flight at the plan were to compute
    seen: int = 0  # that an earlier request had
    akin: int = 0  # that an earlier request had with another identity
    identity: Fate = Fate.OTHER_VERSION  # which identity that was
    gone: Fate = Fate.UNKNOWN  # why what was seen is nowhere now
    barred: Fate | None = None  # why the engine could not use what it did not use
    late: Fate = Fate.LOAD_FAILED  # why decode had to compute what a prefill leg brought


def split(known: Evidence) -> Fates:
    """The fates of all tokens; they add up to `known.prompt`."""
    prompt, block, cached, barred = known.prompt, known.block or 1, known.cached, known.barred
    usable = max(prompt - 1, 0) // block * block
    if cached is None:
        cached = min(max(known.own, known.lower, known.store), usable)
    reached = usable if known.loaded is None else min(known.loaded, usable)
    reused = cached if known.loaded is None else min(cached, known.loaded)
    told = max(known.own, known.lower) if known.sure else 0
    own, rest = known.own, Fate.ENGINE
    if known.held is not None:
        own, rest = known.held, Fate.STORE
    fates: Fates = {}
    at = 0
    for end, fate in (
        (min(own, reused), Fate.ENGINE),
        (min(known.lower, reused), Fate.LOWER),
        (min(known.node, reused), Fate.STORE),
        (min(known.store, reused), Fate.NEIGHBOUR),
        (reused, rest),  # more than the router knew of
        (min(told, reached), barred or Fate.NOT_REPORTED),
        (min(known.store, reached), barred or Fate.LOAD_FAILED),
        (min(known.elsewhere, reached), barred or Fate.BUSY_ELSEWHERE),
        (min(known.coming, known.seen, reached), barred or Fate.ON_ITS_WAY),
        (min(known.seen, reached), barred or known.gone),
        (min(known.akin, reached), known.identity),
        (reached, Fate.FIRST_USE),
        (usable, known.late),
        (prompt, Fate.TAIL),
    ):
        if end > at < prompt:
            fates[fate] = fates.get(fate, 0) + min(end, prompt) - at
            at = min(end, prompt)
    return fates


def count_fates(prompts: Iterable[Evidence], counts: dict[str, int]) -> dict[str, int] | None:
    """The fates of the tokens of some prompts, which are added to `counts`; None: no prompt."""
    found: dict[str, int] = {}
    for known in prompts:
        for fate, tokens in split(known).items():
            found[fate] = found.get(fate, 0) + tokens
            counts[fate] = counts.get(fate, 0) + tokens
    return found or None
