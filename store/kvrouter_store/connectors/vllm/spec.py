"""VLLM's tiered offloading with the store below it, on every device: class StoreOffloadingSpec."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvrouter_store.connectors.vllm.host_chunks import HostChunks
from kvrouter_store.connectors.vllm.host_memory import end_agreement
from kvrouter_store.connectors.vllm.host_worker import HostWorker
from kvrouter_store.connectors.vllm.pinned_tiers import PinnedTiers
from kvrouter_store.connectors.vllm.pool_worker import PoolWorker, Share
from kvrouter_store.connectors.vllm.self_test import check_copies, check_store


class StoreOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """As vLLM's own, which has no worker for a CPU and keeps a file in /dev/shm while it runs."""

    _worker: Any

    def get_manager(self) -> OffloadingManager:
        """The manager of the tiers.

        The scheduler is the last to map the host memory: its file loses its name here, so that an
        engine that is killed leaves nothing behind. Where it is the first, workers need the name.
        """
        manager = super().get_manager()
        if not isinstance(manager, PinnedTiers):
            manager = PinnedTiers(HostChunks(manager.primary_tier), manager.secondary_tiers)
            self._manager = manager
        region = self._scheduler_mmap
        if self.extra_config["self_test"]:
            (tier,) = manager.secondary_tiers
            with _nameless_if_it_fails(region, tier.shutdown):
                check_store(tier)
        if not region._creator:
            _unlink(region)
            end_agreement(self._engine_id)
        return manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """What copies between the cache and the host memory."""
        worker = self._made_worker(kv_caches)
        if self.extra_config["self_test"]:
            with _nameless_if_it_fails(worker._mmap_region):
                check_copies(kv_caches, worker)
        settings = self.extra_config["pool"]
        if settings is None:
            return worker
        rank = self.config.parallel.rank
        share = Share(
            rank=rank,
            ranks=self.config.parallel.world_size,
            slot=0 if self.replicated_layout else rank,
            page_bytes=self.cpu_page_size_per_worker,
            block_bytes=self.kv_bytes_per_chunk,
            verify=settings.verify,
        )
        client = settings.client(f"{settings.name or 'vllm'}/rank {rank}")
        return PoolWorker(worker, share, self._maker(kv_caches), client)

    def _maker(self, kv_caches: Any) -> Callable[[Any], OffloadingWorker]:
        """Makes workers over other memory than vLLM's, in any thread."""
        canonical = self.config.canonical_layout
        if current_platform.is_cpu():
            return lambda region: HostWorker(kv_caches, region, canonical=canonical)
        device = torch.accelerator.current_device_index()

        def make(region: Any) -> OffloadingWorker:
            torch.accelerator.set_device_index(device)
            chunks = self.blocks_per_chunk, self.num_chunks
            return CPUOffloadingWorker(kv_caches, *chunks, region, canonical_layout=canonical)

        return make

    def _made_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not current_platform.is_cpu():
            worker = super().get_worker(kv_caches)
            worker._mmap_region._creator = False  # see get_manager
            return worker
        if not isinstance(self._worker, HostWorker):
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            region._creator = False
            self._worker = HostWorker(kv_caches, region, canonical=self.config.canonical_layout)
        return self._worker


@contextlib.contextmanager
def _nameless_if_it_fails(region: SharedOffloadRegion, *end: Callable[[], None]) -> Iterator[None]:
    """An engine that does not start leaves no file behind, and no thread."""
    try:
        yield
    except BaseException:
        _unlink(region)
        for each in end:
            each()
        raise


def _unlink(region: SharedOffloadRegion) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(region.mmap_path)
