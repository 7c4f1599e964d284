"""Copies KV between an engine's cache and vLLM's host memory where both are memory of this host.

vLLM has such a worker for devices alone (vllm/v1/kv_offload/cpu/gpu_worker.py); this one is for its
CPU backend. A copy is done when its submission returns.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numpy.lib.stride_tricks import as_strided
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


@dataclass(frozen=True, slots=True)
class Fragments:
    """Equal pieces of every page of a tensor, in the cache and in host memory: (page, piece, byte).

    writers, turn: ranks that hold the same bytes take turns to write them, by number of the chunk.
    """

    cache: Any
    host: Any
    writers: int = 1
    turn: int = 0


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks of one rank. Owns its map of the region: shutdown() ends it.

    kv_caches: vLLM's CanonicalKVCaches. canonical: a chunk is laid out as if there were one rank.
    """

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion, *, canonical: bool) -> None:
        self._mmap_region = region
        caches = [each.tensor.numpy() for each in kv_caches.tensors]
        groups = kv_caches.group_data_refs
        if canonical:
            hosts = [region.create_next_canonical_view(n).numpy() for n in _whole_pages(groups)]
            self._groups = [
                [each for ref in refs for each in _mapped(ref, caches, hosts)] for refs in groups
            ]
        else:
            pages = [each.page_size_bytes for each in kv_caches.tensors]
            hosts = [region.create_next_worker_view(page).numpy() for page in pages]
            numbers = [sorted({ref.tensor_idx for ref in refs}) for refs in groups]
            self._groups = [[Fragments(caches[n], hosts[n]) for n in some] for some in numbers]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the cache into chunks."""
        begun, moved = time.monotonic(), 0
        for each, blocks, chunks in self._each(src_spec, dst_spec):
            own = slice(None) if each.writers == 1 else chunks % each.writers == each.turn
            each.host[chunks[own]] = each.cache[blocks[own]]
            moved += len(blocks[own]) * each.host[0].size
        return self._end(job_id, moved, begun)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks into blocks of the cache."""
        begun, moved = time.monotonic(), 0
        for each, blocks, chunks in self._each(dst_spec, src_spec):
            each.cache[blocks] = each.host[chunks]
            moved += len(blocks) * each.host[0].size
        return self._end(job_id, moved, begun)

    def get_finished(self) -> list[TransferResult]:
        """The jobs since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing runs."""

    def shutdown(self) -> None:
        """End the map of the region."""
        self._groups.clear()
        self._mmap_region.cleanup()

    def _each(self, cache_spec: Any, chunk_spec: Any) -> Iterator[tuple[Fragments, Any, Any]]:
        """What a job copies of each group: fragments, numbers of blocks, numbers of chunks."""
        first = 0
        for group, count in enumerate(cache_spec.group_sizes):
            taken = slice(first, first + count)
            first += count
            for each in self._groups[group] if count else ():
                yield each, cache_spec.block_ids[taken], chunk_spec.chunk_ids[taken]

    def _end(self, job_id: int, moved: int, begun: float) -> bool:
        took = time.monotonic() - begun
        self._finished.append(TransferResult(job_id, True, moved, took))
        return True


def _whole_pages(groups: Any) -> list[int]:
    """Bytes of a page over all ranks, by tensor; groups share tensors."""
    found: dict[int, int] = {}
    for ref in (ref for refs in groups for ref in refs):
        size = ref.mapping.canonical_page_size_bytes
        found[ref.tensor_idx] = max(size, found.get(ref.tensor_idx, 0))
    return [found[number] for number in sorted(found)]


def _mapped(ref: Any, caches: list[Any], hosts: list[Any]) -> Iterator[Fragments]:
    """Where the pieces of this rank's page of a layer are in a page over all ranks."""
    cache, host, mapping = caches[ref.tensor_idx], hosts[ref.tensor_idx], ref.mapping
    for run in mapping.runs:
        shape = run.num_fragments, run.fragment_size
        yield Fragments(
            _pieces(cache[:, run.local_offset :], shape, run.local_stride),
            _pieces(host[:, run.canonical_offset :], shape, run.canonical_stride),
            mapping.num_writers,
            mapping.writer_index,
        )


def _pieces(pages: Any, shape: tuple[int, int], stride: int) -> Any:
    return as_strided(pages, (len(pages), *shape), (pages.strides[0], stride, 1))
