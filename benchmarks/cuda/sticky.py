"""After an error of the device nothing is copied, so that nothing wrong is stored."""

from collections.abc import Callable

import torch

from benchmarks.cuda.check import DEADLINE_S, Answer, fetch, layer_of
from benchmarks.cuda.gpu import Gpu, copier_of
from kvrouter_store.tensors.base import CopyFailed

PAGES, PAGE_BYTES = 16, 64 << 10


def check(gpu: Gpu) -> Answer:
    """A copy, a load, and what is asked for after them: all fail."""
    copier = copier_of(gpu, 4, PAGES * PAGE_BYTES)
    other = copier_of(gpu, 2, PAGES * PAGE_BYTES)
    # torch ends a process that frees pinned memory after an error.
    self_holding: list[object] = [copier, other]
    self_holding.append(self_holding)
    layer = layer_of(torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8, device=gpu.device))
    staged = copier.stage(layer, range(PAGES), DEADLINE_S)
    loaded = other.stage(layer, range(PAGES), DEADLINE_S)
    gpu.spin(0.05)
    gpu.corrupt()
    refusals = {
        "the copy behind the error": _refused(lambda: fetch(staged)),
        "the next of the same copier": _refused(lambda: copier.stage(layer, [0], DEADLINE_S)),
        "a load by another copier": _refused(lambda: loaded.deliver(PAGES, DEADLINE_S)),
        "the next of that": _refused(lambda: other.stage(layer, [0], DEADLINE_S)),
    }
    missing = [name for name, text in refusals.items() if text is None]
    says = f"after an error of the device {len(refusals) - len(missing)} of {len(refusals)} fail"
    return Answer(not missing, says, {"refusals": refusals})


def _refused(work: Callable[[], object]) -> str | None:
    """The first line of the failure; None where there was none."""
    try:
        work()
    except CopyFailed as error:
        return str(error).splitlines()[0]
    return None
