"""The `priority` of prefill legs: engines that schedule by it begin with the shortest. Pure.

vLLM with `--scheduling-policy priority` begins with the lowest `priority`, among equals with the
first that came (vllm/v1/core/sched/request_queue.py). Otherwise its V1 engine ignores it, and its
V0 engine refuses it with 400, which detection finds out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Literal

from kvrouter.openai.request import Request, priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.engine import Engine

TOKENS_PER_MS: Final = 10.0
"""Prompt tokens that an engine computes in a millisecond without attention. Only the order of legs
and their aging depend on it."""
LONG_CONTEXT_TOKENS: Final = 32768
"""Context at which attention costs as much as all else (8B: about 30,000)."""
AGING: Final = 0.1
"""Milliseconds of work that a millisecond of waiting is worth: only legs that come within 10 W ms
can overtake a leg of W ms, so that a long prompt does not wait for ever."""
STRIDE: Final = 1 << 40
"""Between two priorities of clients; more than any leg's own."""
MAX_GIVEN: Final = 1 << 22
"""Engines take 64 bits; larger priorities of clients are passed on as they are."""
Mode = Literal["auto", "on", "off"]


def work_ms(computed_tokens: int, held_tokens: int) -> float:
    """Rough time to compute so many tokens after `held_tokens`, in milliseconds."""
    context = held_tokens + computed_tokens / 2
    return computed_tokens * (1 + context / LONG_CONTEXT_TOKENS) / TOKENS_PER_MS


class PrefillPriorities:
    """Ranks prefill legs, in the same way on all routers: `clock` is Unix time.

    Mode "auto": for engines that took a priority when they joined; "on": for all.
    """

    def __init__(self, mode: Mode, clock: Callable[[], float] = time.time) -> None:
        self._mode = mode
        self._clock = clock

    def of(self, request: Request, engine: Engine, computed_tokens: int) -> int | None:
        """The `priority` of a leg on `engine`: the client's first, then work and age.

        None: the client's is passed on. ApiError 400: the client's is no integer.
        """
        identity = engine.identity
        if self._mode == "off" or identity is None:
            return None
        if self._mode == "auto" and not identity.takes_priority:
            return None
        given = priority(request) if "priority" in request.spans else 0
        if abs(given) > MAX_GIVEN:
            return None
        work = work_ms(computed_tokens, request.prompt_tokens - computed_tokens)
        own = int(work + AGING * 1000 * self._clock())
        return given * STRIDE + min(own, STRIDE - 1)
