"""Computing does not wait for copies: how much slower matrix products are beside them."""

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.cuda.check import Answer, fetch, interval, layer_of, staged
from benchmarks.cuda.gpu import Gpu, copier_of

BAR = 1.03
LEAST_COPIED = 0.5  # of what is copied while nothing is computed
SIZE, PRODUCTS = 8192, 40
PAGES, PAGE_BYTES = 1024, 64 << 10
SLOT_BYTES = 16 << 20
ROUNDS = 9
ALONE_S = 0.3


def check(gpu: Gpu, size: int = SIZE, products: int = PRODUCTS, rounds: int = ROUNDS) -> Answer:
    """Rounds of A B B A: products alone (A), and while another thread copies to the host (B)."""
    left = torch.rand(size, size, device=gpu.device).to(torch.bfloat16)
    result = torch.empty_like(left)

    def compute() -> float:
        gpu.synchronize()
        begun = time.perf_counter()
        for _ in range(products):
            gpu.compute(lambda: torch.mm(left, left, out=result))
        gpu.synchronize()
        return time.perf_counter() - begun

    compute()
    with _copies(gpu) as copied:
        time.sleep(ALONE_S)
    usual = len(copied) / ALONE_S
    ratios, speeds = list[float](), list[float]()
    for _ in range(rounds):
        alone = compute()
        with _copies(gpu) as copied:
            beside = compute() + compute()
        speeds.append(len(copied) / beside)
        alone += compute()
        ratios.append(beside / alone)
    found = interval(ratios)
    share = statistics.median(speeds) / usual
    says = (
        f"matrix products take {found['median']:.3f} times as long ({found['low']:.3f} to"
        f" {found['high']:.3f}, bar {BAR}) beside copies at {share:.0%} of their usual speed"
        f" (bar {LEAST_COPIED:.0%})"
    )
    passed = found["median"] <= BAR and share >= LEAST_COPIED
    figures = {"ratio": found, "copies_per_s": usual, "share_of_copies": share}
    return Answer(passed, says, figures)


@contextmanager
def _copies(gpu: Gpu) -> Iterator[list[int]]:
    """A thread that copies without a pause, until the end of the context; a number for each."""
    copier = copier_of(gpu, 2, SLOT_BYTES)
    pages = torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8, device=gpu.device)
    layer = layer_of(pages)
    indices = list(range(0, PAGES, PAGES * PAGE_BYTES // SLOT_BYTES))
    gpu.synchronize()
    ended, copies = threading.Event(), list[int]()

    def work() -> None:
        with gpu.apart():
            while not ended.is_set():
                with staged(copier, layer, indices) as staging:
                    fetch(staging)
                copies.append(len(copies))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield copies
    finally:
        ended.set()
        thread.join()
        copier.close()
