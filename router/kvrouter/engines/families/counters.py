"""Counters by which engines show that their core works.

vLLM counts each step (v1/metrics/loggers.py, `counter_generation_tokens`). SGLang's scheduler
counts `realtime_tokens` each step or log interval (srt/observability/scheduler_metrics_mixin.py),
the others when a request ends. The server itself moves none of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine

PAGE: Final = "/metrics"
_TOKENS: Final = re.compile(
    rb"^(?:vllm|sglang):(?:prompt|generation|realtime)_tokens_total(?:\{(.*)\})? (\d\S*)",
    re.MULTILINE,
)
_RANK: Final = re.compile(rb'\b(?:engine|dp_rank)="(\d+)"')


def tokens_counted(page: bytes, target: Engine) -> float | None:
    """Tokens that `target` has counted so far; None: it counts none.

    Those of its own data-parallel rank, if the page tells ranks apart.
    """
    counts = [(_RANK.search(labels), float(count)) for labels, count in _TOKENS.findall(page)]
    if not counts:
        return None
    own = b"%d" % target.event_rank
    if target.rank is not None and any(rank and rank[1] == own for rank, _ in counts):
        counts = [(rank, count) for rank, count in counts if rank and rank[1] == own]
    return sum(count for _, count in counts)
