"""What a check answers, and memory that checks compare."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from benchmarks.cuda.pool import tensor_at
from kvrouter_store.tensors.base import Staging
from kvrouter_store.tensors.layers import HostBlocks, LayerBlocks
from kvrouter_store.tensors.staged import StagedCopier

TOKENS = 16  # of a block; how many makes no difference to a copy
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Answer:
    """Whether the GPU does what must hold, one sentence, and what was measured."""

    passed: bool
    says: str
    figures: dict[str, Any] = field(default_factory=dict)


def layer_of(pages: Tensor) -> LayerBlocks:
    """Pages, [pages, bytes] of uint8, as blocks of a layer."""
    return LayerBlocks.paged(pages.unflatten(1, (TOKENS, -1)))


@contextmanager
def staged(copier: StagedCopier, layer: LayerBlocks, pages: Sequence[int]) -> Iterator[Staging]:
    """Host memory for some pages, until the end of the context."""
    staging = copier.stage(layer, pages, DEADLINE_S)
    try:
        yield staging
    finally:
        staging.release()


def fetch(staging: Staging) -> None:
    """Copy the pages into the host memory."""
    staging.fetch()
    staging.wait(DEADLINE_S)


def staged_bytes(held: HostBlocks, count: int) -> Tensor:
    """What the host memory of a staging holds of the only tensor: [count, bytes of a block]."""
    size = count * held.sizes[0]
    return tensor_at(held.bases[0], size).view(count, held.sizes[0])


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median of measurements, and what nine of ten lie between."""
    ranked = sorted(values)
    cut = len(ranked) // 20
    return {
        "median": statistics.median(ranked),
        "low": ranked[cut],
        "high": ranked[len(ranked) - 1 - cut],
    }
