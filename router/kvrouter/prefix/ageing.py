"""What an engine has probably evicted, where nobody tells: what it used longest ago.

vLLM and SGLang evict the least recently used prefix, the end of a chain first. So the router keeps
the same order for what it guesses that an engine holds, up to the tokens that its cache takes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Final

STEP_TOKENS: Final = 1024
"""Of a chain one block in so many tokens stands for all: each one would take time and memory."""
MOST_HELD: Final = 1 << 17
"""Blocks that stand for an engine: 134 million tokens, about 14 MiB."""


class Ageing:
    """The blocks that stand for what one engine holds, in the order of their last use."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, int] = OrderedDict()  # tokens for which each stands
        self._tokens = 0

    def used(self, ids: array[int], block_tokens: int, cache_tokens: int) -> array[int]:
        """The engine used a chain of blocks; returns those that it had to evict for them.

        They are the last ones of their steps: without them their chains match no further.
        """
        step, held = max(1, STEP_TOKENS // block_tokens), self._held
        if len(ids) < step:
            step = len(ids) or 1
        for last in reversed(ids[step - 1 :: step]):
            self._tokens += step * block_tokens - held.pop(last, 0)
            held[last] = step * block_tokens
        gone = array("Q")
        while self._tokens > cache_tokens or len(held) > MOST_HELD:
            last, tokens = held.popitem(last=False)
            self._tokens -= tokens
            gone.append(last)
        return gone
