"""A copy takes the bytes of its place in the queue: what was computed before, nothing of after."""

from collections.abc import Callable, Sequence

import torch

from benchmarks.cuda.check import DEADLINE_S, Answer, fetch, layer_of, staged, staged_bytes
from benchmarks.cuda.gpu import Gpu, copier_of
from kvrouter_store.tensors.staged import StagedCopier

PAGES, PAGE_BYTES = 64, 64 << 10
SPIN_S = 0.05
ROUNDS = 20
OLD, NEW, LATER = 1, 2, 3
WHERE: tuple[Sequence[int], ...] = (range(PAGES), range(PAGES)[::-1])  # a run, and a gather


def check(gpu: Gpu, rounds: int = ROUNDS, spin_s: float = SPIN_S) -> Answer:
    """All three orders, several times, while the computing queue is kept busy."""
    copier = copier_of(gpu, 1, PAGES * PAGE_BYTES)
    failures = {
        order.__name__.lstrip("_"): sum(
            not order(gpu, copier, spin_s, WHERE[turn % len(WHERE)]) for turn in range(rounds)
        )
        for order in (_computed_before, _overwritten_after, _scattered_between)
    }
    copier.close()
    says = f"{3 * rounds} copies beside a busy queue: {sum(failures.values())} out of order"
    return Answer(not any(failures.values()), says, {"rounds": rounds, "failures": failures})


def _computed_before(gpu: Gpu, copier: StagedCopier, spin_s: float, where: Sequence[int]) -> bool:
    """A copy that begins while its bytes are still computed waits for them."""
    return _fetched(gpu, copier, spin_s, where, lambda _: None) == {NEW}


def _overwritten_after(gpu: Gpu, copier: StagedCopier, spin_s: float, where: Sequence[int]) -> bool:
    """Once the copy is said to have ended, its bytes are not those of later work."""

    def overwrite(pages: torch.Tensor) -> None:
        gpu.compute(lambda: pages.fill_(LATER))
        gpu.synchronize()

    return _fetched(gpu, copier, spin_s, where, overwrite) == {NEW}


def _fetched(
    gpu: Gpu,
    copier: StagedCopier,
    spin_s: float,
    where: Sequence[int],
    after: Callable[[torch.Tensor], None],
) -> set[int]:
    """What a copy brings: all bytes are OLD, and become NEW when a busy queue comes to it."""
    pages = torch.full((PAGES, PAGE_BYTES), OLD, dtype=torch.uint8, device=gpu.device)
    gpu.synchronize()
    gpu.spin(spin_s)
    gpu.compute(lambda: pages.fill_(NEW))
    with staged(copier, layer_of(pages), where) as staging:
        staging_bytes = staged_bytes(staging.memory, PAGES)
        staging_bytes.zero_()
        fetch(staging)
        after(pages)
        return set(staging_bytes.unique().tolist())


def _scattered_between(gpu: Gpu, copier: StagedCopier, spin_s: float, where: Sequence[int]) -> bool:
    """What is loaded comes after readers that were queued before, and before those queued next."""
    pages = torch.full((PAGES, PAGE_BYTES), OLD, dtype=torch.uint8, device=gpu.device)
    before, after = torch.zeros_like(pages), torch.zeros_like(pages)
    with staged(copier, layer_of(pages), where) as staging:
        staged_bytes(staging.memory, PAGES).fill_(NEW)
        gpu.synchronize()
        gpu.spin(spin_s)
        gpu.compute(lambda: before.copy_(pages))
        staging.deliver(PAGES, DEADLINE_S)
        gpu.compute(lambda: after.copy_(pages))
        gpu.synchronize()
    return set(before.unique().tolist()) == {OLD} and set(after.unique().tolist()) == {NEW}
