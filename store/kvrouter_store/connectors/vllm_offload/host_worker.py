"""Copies KV between an engine's cache and vLLM's host memory where both are memory of this host.

vLLM has such a worker for devices alone (vllm/v1/kv_offload/cpu/gpu_worker.py); this one is for its
CPU backend. A copy is done when its submission returns.
"""

import time
from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks of one rank. Owns its map of the region: shutdown() ends it.

    kv_caches: vLLM's CanonicalKVCaches; a page of each tensor has a place in every chunk.
    """

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pages = [
            (tensor.tensor.numpy(), region.create_next_worker_view(tensor.page_size_bytes).numpy())
            for tensor in kv_caches.tensors
        ]
        self._tensors_of = [
            sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the cache into chunks."""
        begun = time.monotonic()
        moved = 0
        for cache, host, blocks, chunks in self._runs(src_spec, dst_spec):
            host[chunks] = cache[blocks]
            moved += len(blocks) * host.shape[1]
        return self._end(job_id, moved, begun)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks into blocks of the cache."""
        begun = time.monotonic()
        moved = 0
        for cache, host, blocks, chunks in self._runs(dst_spec, src_spec):
            cache[blocks] = host[chunks]
            moved += len(blocks) * host.shape[1]
        return self._end(job_id, moved, begun)

    def get_finished(self) -> list[TransferResult]:
        """The jobs since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing runs."""

    def shutdown(self) -> None:
        """End the map of the region."""
        self._pages.clear()
        self._region.cleanup()

    def _runs(self, cache_spec: Any, chunk_spec: Any) -> Iterator[tuple[Any, ...]]:
        """Cache, host memory, block and chunk numbers: of each tensor of each group of a job."""
        first = 0
        for group, count in enumerate(cache_spec.group_sizes):
            taken = slice(first, first + count)
            first += count
            blocks, chunks = cache_spec.block_ids[taken], chunk_spec.chunk_ids[taken]
            for tensor in self._tensors_of[group] if count else ():
                yield *self._pages[tensor], blocks, chunks

    def _end(self, job_id: int, moved: int, begun: float) -> bool:
        took = time.monotonic() - begun
        self._finished.append(TransferResult(job_id, True, moved, took))
        return True
