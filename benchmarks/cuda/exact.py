"""Every byte arrives: pages of all sizes, dense and padded, in one piece and in 100,000."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from benchmarks.cuda.check import DEADLINE_S, Answer, fetch, layer_of, staged, staged_bytes
from benchmarks.cuda.gpu import Gpu, copier_of
from kvrouter_store.tensors.staged import StagedCopier

KIB = 1 << 10
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
COUNTS = (1, 100, 1000, 10_000, 100_000)
MOST_BYTES = 1 << 29
SLOT_BYTES = 16 << 20
SPARE, PADDING = 5, 512  # pages that are not used, and bytes between pages


@dataclass(frozen=True)
class Case:
    """So many pages of some bytes, with others between them, in a row or anywhere."""

    page: int
    count: int
    padding: int
    in_a_row: bool

    def __str__(self) -> str:
        where = "in a row" if self.in_a_row else "anywhere"
        return f"{self.count} pages of {self.page} bytes {where}, {self.padding} bytes between them"

    @property
    def shape(self) -> tuple[int, int]:
        """Of the memory: some pages more than are used, and what is between them."""
        return self.count + SPARE, self.page + self.padding


@dataclass(frozen=True)
class Pages:
    """Pages on the device with the same bytes in host memory, and those that are used."""

    case: Case
    truth: Tensor
    device: Tensor
    landed: Tensor  # where the used ones come to, with what is between them
    indices: list[int]

    @classmethod
    def drawn(cls, gpu: Gpu, case: Case) -> "Pages":
        """Random bytes, drawn eight at a time."""
        generator = torch.Generator().manual_seed(case.page + case.count)
        rows, width = case.shape
        words = torch.randint(-(1 << 63), (1 << 63) - 1, (rows, width // 8), generator=generator)
        truth = words.view(torch.uint8)
        indices = random.Random(case.count).sample(range(rows), case.count)
        if case.in_a_row:
            indices = list(range(SPARE - 1, SPARE - 1 + case.count))
        device, landed = truth.to(gpu.device), torch.zeros_like(truth, device=gpu.device)
        gpu.synchronize()
        return cls(case, truth[:, : case.page], device[:, : case.page], landed, indices)

    @property
    def target(self) -> Tensor:
        """The pages of `landed`."""
        return self.landed[:, : self.case.page]

    def have_landed(self, gpu: Gpu) -> bool:
        """Whether these pages, and nothing else, came."""
        gpu.synchronize()
        expected = torch.zeros(self.case.shape, dtype=torch.uint8)
        expected[self.indices, : self.case.page] = self.truth[self.indices]
        same: bool = torch.equal(self.landed.cpu(), expected)
        return same


def check(gpu: Gpu, most_bytes: int = MOST_BYTES) -> Answer:
    """Gather and scatter by the copier, and by cuMemcpyBatchAsync where the driver has it."""
    copier = copier_of(gpu, 2, SLOT_BYTES)
    wrong, done, largest = list[str](), 0, 0
    for case in _cases(most_bytes):
        wrong += [f"copier, {case}"] * (not _by_copier(gpu, copier, Pages.drawn(gpu, case)))
        if gpu.batch_copy is not None:
            wrong += [f"batch, {case}"] * (not _by_batch(gpu, Pages.drawn(gpu, case)))
        done, largest = done + 1, max(largest, case.count)
    copier.close()
    batch = "and by cuMemcpyBatchAsync" if gpu.batch_copy else "(no cuMemcpyBatchAsync here)"
    says = f"{done} cases of at most {largest} pages by the copier {batch}: {len(wrong)} wrong"
    return Answer(not wrong and done > 0, says, {"cases": done, "wrong": wrong})


def _cases(most_bytes: int) -> Iterator[Case]:
    for page, count in product(PAGES, COUNTS):
        for padding, in_a_row in ((0, False), (PADDING, False), (PADDING, True)):
            case = Case(page, count, padding, in_a_row)
            if case.shape[0] * case.shape[1] <= most_bytes:
                yield case


def _by_copier(gpu: Gpu, copier: StagedCopier, pages: Pages) -> bool:
    """Out to the host and into other memory on the device: both as they should be."""
    source, target = layer_of(pages.device), layer_of(pages.target)
    most = copier.most_blocks(source)
    for first in range(0, len(pages.indices), most):
        some = pages.indices[first : first + most]
        with staged(copier, source, some) as taken, staged(copier, target, some) as given:
            fetch(taken)
            bytes_taken = staged_bytes(taken.memory, len(some))
            if not torch.equal(bytes_taken, pages.truth[some]):
                return False
            staged_bytes(given.memory, len(some)).copy_(bytes_taken)
            given.deliver(len(some), DEADLINE_S)
    return pages.have_landed(gpu)


def _by_batch(gpu: Gpu, pages: Pages) -> bool:
    """The same in one call each way, through host memory of the size of all pages."""
    assert gpu.batch_copy is not None
    count, page = len(pages.indices), pages.case.page
    host = gpu.copying().host_memory(count * page).view(count, page)
    host.zero_()
    dense = [host.data_ptr() + page * at for at in range(count)]
    gpu.batch_copy.submit(dense, _addresses(pages.device, pages.indices), [page] * count)
    gpu.synchronize()
    if not torch.equal(host, pages.truth[pages.indices]):
        return False
    gpu.batch_copy.submit(_addresses(pages.target, pages.indices), dense, [page] * count)
    return pages.have_landed(gpu)


def _addresses(pages: Tensor, indices: list[int]) -> list[int]:
    first, stride = pages.data_ptr(), pages.stride(0)
    return [first + stride * at for at in indices]
