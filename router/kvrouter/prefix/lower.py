"""What engines hold below their own caches, in host memory and in storage, by their KV events.

They load it, which takes less than to compute it and more than to find it in their own caches.
"""

from __future__ import annotations

from enum import StrEnum
from heapq import nlargest
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from kvrouter.prefix.index import PrefixIndex
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.engine import Engine


class Tier(StrEnum):
    """Where an engine holds blocks; a metric's label."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


MEDIA: Final[Mapping[str | None, Tier]] = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), Tier.HOST),
}
"""Tiers by the medium of an event; all other media are storage.

vLLM 0.33 names GPU (on its CPU build too), CPU and STORAGE (vllm/distributed/kv_events.py), SGLang
GPU, CPU_PINNED (once CPU_TIER1), DISK and EXTERNAL (sglang/srt/disaggregation/kv_events.py).
"""
LOAD_COSTS: Final = {Tier.HOST: 0.2, Tier.STORAGE: 0.7}
"""What a token that is loaded from a lower tier costs, in computed ones.

Host: for 8,192 tokens of a 7B model vLLM 0.32 takes 28 ms on an H200 if its own cache has them, 65
if its host memory has, and 218 if it computes them: (65 - 28) / (218 - 28). llm-d has 0.2 (its
weight of 0.8), Dynamo 0.25. Storage is llm-d's (Dynamo: 0.75): disks differ, and larger models
gain more than smaller ones.
"""
MOST_STARTS: Final = 4
"""Lengths of what own caches hold of a prompt, from which lower tiers are asked for the rest."""


class Loadable(NamedTuple):
    """What an engine need not compute of a prompt."""

    blocks: int = 0  # leading ones that it holds in any tier
    cost: float = 0.0  # of loading those beyond its own cache, in blocks that it could compute


NOTHING: Final = Loadable()


class Held(NamedTuple):
    """What engines have of a prompt; those with nothing are absent."""

    own: Mapping[Engine, int] = MappingProxyType({})  # leading blocks in their caches, by events
    guesses: Mapping[Engine, int] = MappingProxyType({})  # leading blocks that they probably have
    lower: Mapping[Engine, Loadable] = MappingProxyType({})


class LowerTiers:
    """An index of `max_blocks` for each lower tier. One thread."""

    def __init__(self, max_blocks: int) -> None:
        self.indexes = {tier: PrefixIndex(max_blocks) for tier in LOAD_COSTS}

    def match(self, hashes: bytes, own: Mapping[Engine, int]) -> dict[Engine, Loadable]:
        """What engines can load of a chain; those with nothing beyond their own caches are absent.

        `own` are the leading blocks that own caches hold. A tier goes on where the one above ends:
        some hold copies of all blocks, others only what was evicted above.
        """
        held = dict(own)
        found: dict[Engine, Loadable] = {}
        for tier, index in self.indexes.items():
            more: dict[Engine, int] = {}
            for start in {0, *nlargest(MOST_STARTS, set(held.values()))} if len(index) else ():
                for engine, blocks in index.match(hashes[start * HASH_BYTES :]).items():
                    if held.get(engine, 0) == start:
                        more[engine] = blocks
            for engine, blocks in more.items():
                held[engine] = held.get(engine, 0) + blocks
                cost = found.get(engine, NOTHING).cost + LOAD_COSTS[tier] * blocks
                found[engine] = Loadable(held[engine], cost)
        return found
