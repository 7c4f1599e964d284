"""How long this engine takes to compute prompts, by those that it computed. Imports no vLLM."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, Final

ASSUMED_S = 1 / 4000  # seconds of a token, before anything was measured
LEAST_TOKENS: Final = 256  # of a prompt that is measured: short ones say more of decodes beside it
KEPT: Final = 9


class Pace:
    """Seconds per token of the last prompts, from their first step to their first token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[str, tuple[float, int]] = {}
        self._measured: deque[float] = deque([ASSUMED_S], KEPT)

    def seconds(self, tokens: int) -> float:
        """What so many tokens would take to compute."""
        return tokens * median(self._measured)

    def begin(self, request_id: str, tokens: int) -> None:
        """So many tokens of a request are computed from now on."""
        if tokens >= LEAST_TOKENS:
            self._begun[request_id] = self._clock(), tokens

    def look(self, find: Callable[[str], Any]) -> None:
        """Note which requests have their first token. `find`: vLLM's of this id; None: it ended."""
        for request_id in list(self._begun):
            request = find(request_id)
            if request is None or request.num_output_tokens:
                self.end(request_id, computed=request is not None)

    def end(self, request_id: str, *, computed: bool) -> None:
        """The first token of a request came, or never will."""
        begun = self._begun.pop(request_id, None)
        if begun is None or not computed:
            return
        if len(self._measured) == 1:
            self._measured.clear()  # what was assumed, or the first, which may have compiled
        self._measured.append((self._clock() - begun[0]) / begun[1])
