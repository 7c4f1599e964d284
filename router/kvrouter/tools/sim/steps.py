"""The steps of an engine that computes prompts and answers together. Pure: it takes the time.

As in vLLM with chunked prefill: a chunk of a prompt takes a step, chunks follow each other, and the
tokens of running answers are ready at the end of a step.
"""

from collections import deque


class Steps:
    """Chunks that are computed one after the other."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[float, float]] = deque()

    def begin(self, now_s: float, seconds: float) -> float:
        """Compute a chunk of so many seconds after the earlier ones; the time when it is done."""
        while self._chunks and self._chunks[0][1] <= now_s:
            self._chunks.popleft()
        begin_s = self._chunks[-1][1] if self._chunks else now_s
        self._chunks.append((begin_s, begin_s + seconds))
        return begin_s + seconds

    def token_at(self, due_s: float) -> float:
        """When a token is ready that is due then: at the end of a chunk that is being computed."""
        for begin_s, end_s in self._chunks:
            if begin_s < due_s < end_s:
                return end_s
        return due_s
