"""The `priority` of prefill legs: engines that schedule by it begin with the shortest.

Pure. vLLM begins with the lowest `priority`, among equals with the one that came first, where it
runs with `--scheduling-policy priority` (vllm/v1/core/sched/request_queue.py). Else its V1 engine
ignores it, and its V0 engine refuses it with 400, which `introduce` finds out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Literal

from kvrouter.openai.request import priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.engine import Engine
    from kvrouter.openai.request import Request

TOKENS_PER_MS: Final = 10.0
"""Prompt tokens that an engine computes in a millisecond, where attention costs nothing. Only the
order of legs depends on it, and how soon the old ones go first."""
LONG_CONTEXT_TOKENS: Final = 32768
"""Tokens before a token at which attention costs as much as all else (8B: about 30,000)."""
AGING: Final = 0.1
"""Milliseconds of work that a millisecond of waiting is worth: a leg of W ms is overtaken by those
that come within 10 W of it at most, so that a long prompt does not wait for ever."""
STRIDE: Final = 1 << 40
"""Between two priorities of clients: more than any leg's own."""
MAX_GIVEN: Final = 1 << 22
"""Engines take 64 bits; what a client gives beyond is passed on as it is."""
Mode = Literal["auto", "on", "off"]


def work_ms(computed_tokens: int, held_tokens: int) -> float:
    """What computing so many tokens behind `held_tokens` takes, roughly, in milliseconds."""
    context = held_tokens + computed_tokens / 2
    return computed_tokens * (1 + context / LONG_CONTEXT_TOKENS) / TOKENS_PER_MS


class PrefillPriorities:
    """Ranks prefill legs, so that engines of all routers compare alike.

    Args:
        mode: which engines are told: "auto": those that took one when they joined; "on": all.
        clock: seconds since the epoch, which routers share.
    """

    def __init__(self, mode: Mode, clock: Callable[[], float] = time.time) -> None:
        self._mode = mode
        self._clock = clock

    def of(self, request: Request, engine: Engine, computed_tokens: int) -> int | None:
        """The `priority` of a leg on `engine`; None: as the client has it.

        The client's own comes first; legs of the same one go by their work and their age.

        Raises:
            ApiError: 400: the client's is no integer.
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
