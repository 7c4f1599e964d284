"""SGLang's hierarchical cache (HiCache) over the store: pages of its host memory in a node.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvrouter",
      "module_path": "kvrouter_store.connectors.sglang", "class_name": "KVStoreHiCache",
      "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
      "url": "kv://127.0.0.1:7400", "weights_revision": "COMMIT"}'

SGLang moves KV between the device and its host memory, and asks this for pages in threads of its
own (sglang/srt/managers/cache_controller.py). An exception there could end the thread, and with it
the cache: operations raise nothing.
"""

import logging
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_model

from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.settings import ConnectorRefused
from kvrouter_store.connectors.sglang.identity import (
    engine_facts,
    manifest_of,
    model_of,
    pool_facts,
)
from kvrouter_store.connectors.sglang.pages import Pages, PoolMemory, pages_at
from kvrouter_store.connectors.sglang.settings import HiCacheSettings, moves_by_address
from kvrouter_store.connectors.sglang.shelf import PageShelf
from kvrouter_store.identity.block import Manifest

log = logging.getLogger("sglang.kvstore")

KV_POOL = "kv"  # PoolName.KV, of models that have one pool
MOST_COMPLAINTS = 16


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps one rank's pages in a store node. Without a reachable store the engine goes on.

    storage_config: SGLang's HiCacheStorageConfig, with the settings in `extra_config`.
    Raises ConnectorRefused (one sentence, with what to set) where they cannot be used. Owns a
    thread and connections once SGLang has registered its host pool: close() ends them.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        self._config, self._settings = storage_config, HiCacheSettings.parse(extra)
        self._by_address = moves_by_address(extra)
        self._flags = get_model()
        self._model = model_of(self._flags, self._settings)
        own = f"sglang/{self._model[0]}@{platform.node() or 'localhost'}:{os.getpid()}"
        self._name = self._settings.name or own
        self._shelf: PageShelf | None = None
        self._memory = PoolMemory(0, 0)
        self._clears, self._update_group = 0, self._settings.update_group or secrets.token_hex(8)
        self._complaints: set[str] = set()
        self._metrics = StorageMetrics() if storage_config.enable_storage_metrics else None

    # SGLang's pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Begin: pages are those of this pool, of SGLang's host memory."""
        super().register_mem_pool_host(mem_pool_host)
        self.close()
        manifest = self._manifest()
        client = self._settings.client(self._name, *self._gpu())
        link = StoreLink(client, manifest, log, engine=self._name)
        link.start()
        self._memory = PoolMemory.of(mem_pool_host)
        self._shelf = PageShelf(link)
        log.info(
            "%s shares pages of %d bytes through %s, manifest %s",
            *(self._name, manifest.block_bytes, self._settings.url, manifest.digest.hex()[:16]),
        )

    def _gpu(self) -> tuple[int, int]:
        """Which of how many GPUs that this process sees; of one alone, which rank of how many."""
        if torch.cuda.device_count() > 1:
            return torch.cuda.current_device(), torch.cuda.device_count()
        return self._config.tp_rank, self._config.tp_size

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse models with further pools: what these hold would be missing after a load."""
        name = getattr(host_pool_name, "value", host_pool_name)
        if name != KV_POOL:
            raise ConnectorRefused(
                f"KVStoreHiCache stores full attention alone, and this engine has a pool {name!r} "
                "too; leave --hicache-storage-backend out"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # Interface v1: SGLang says where pages lie, and nothing is copied on the way.

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Load pages into SGLang's host memory; of each, whether it came as it was put."""
        return self._get(keys, self._in_pool(keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store consecutive pages of SGLang's host memory; of each, whether the store has it."""
        before = getattr(extra_info, "prefix_keys", None) or []
        return self._set(keys, before, self._in_pool(keys, host_indices))

    # The interface without v1: SGLang passes copies of pages.

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Load pages into flat tensors: each, or None where the page did not come."""
        targets = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        came = self._get(keys, self._in_tensors(keys, targets))
        return [target if whole else None for target, whole in zip(targets, came, strict=False)]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages out of flat tensors; whether the store has them all."""
        tensors = [value.contiguous() for value in values or []]
        return all(self._set(keys, [], self._in_tensors(keys, tensors)))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load one page into a flat tensor; None where it did not come."""
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets)[0]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one page out of a flat tensor; whether the store has it."""
        return self.batch_set([key], None if value is None else [value])

    # Both.

    def exists(self, key: str) -> bool:
        """Whether the page can be loaded."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages can be loaded, up to the first that cannot."""
        shelf = self._shelf
        return shelf.leading(keys) if shelf is not None else 0

    def clear(self) -> None:
        """Name pages otherwise from now on: what was stored is not loaded again by this engine.

        The store evicts it when it needs the room. Ranks and engines of one update group share
        again that were cleared as often; without one, this rank shares with no other.
        """
        self._clears += 1
        if self._shelf is None:
            return
        manifest = self._manifest()
        self._shelf.link.rename(manifest)
        log.info(
            "cleared: manifest %s from now on, shared with engines of update_group %r that were "
            "cleared as often (%d)",
            *(manifest.digest.hex()[:16], self._settings.update_group, self._clears),
        )

    def get_stats(self) -> Any:
        """What moved since the last call, as SGLang's metrics take it; None where they are off."""
        if self._metrics is None:
            return None
        taken, self._metrics = self._metrics, StorageMetrics()
        return taken

    def close(self) -> None:
        """End the connections and the thread. Idempotent."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            shelf.close()

    def _manifest(self) -> Manifest:
        facts = {
            **engine_facts(self._flags, self._config),
            **pool_facts(self.mem_pool_host),
            "sglang": sglang.__version__,
            "pages": "in place" if self._by_address else "flat",
            "cleared": f"{self._update_group} {self._clears}" if self._clears else 0,
        }
        return manifest_of(self._model, self._piece_sizes(), facts)

    def _piece_sizes(self) -> list[int]:
        """The sizes of the pieces of a page, in bytes. Raises ConnectorRefused without any."""
        pool, why, sizes = self.mem_pool_host, "it holds none itself", list[int]()
        try:
            if self._by_address:
                sizes += pool.get_page_buffer_meta(torch.arange(pool.page_size))[1]
            else:
                page = pool.get_dummy_flat_data_page()
                sizes.append(page.numel() * page.element_size())
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            why = str(error)
        if not sum(sizes):
            raise ConnectorRefused(
                f"KVStoreHiCache cannot take pages of {type(pool).__name__} in the layout "
                f"{pool.layout} ({why}); set --hicache-mem-layout page_first, or leave "
                "--hicache-storage-backend out"
            )
        return sizes

    def _in_pool(self, keys: Sequence[str], host_indices: Any) -> Pages | None:
        """Where pages are in SGLang's host memory; None where that cannot be."""
        pool = self.mem_pool_host
        if not self._by_address:
            return self._nowhere('SGLang uses interface v1; set "interface_v1": 1')
        if len(host_indices) != len(keys) * pool.page_size:
            return self._nowhere(f"{len(host_indices)} indices for {len(keys)} pages")
        addresses, sizes = pool.get_page_buffer_meta(host_indices)
        return self._pages(keys, addresses, sizes, self._memory.pages_at)

    def _in_tensors(self, keys: Sequence[str], tensors: Sequence[Any]) -> Pages | None:
        """Where pages are that SGLang passed as tensors; None where that cannot be."""
        if self._by_address:
            return self._nowhere('SGLang does not use interface v1; leave "interface_v1" out')
        if len(tensors) != len(keys) or not all(one.is_contiguous() for one in tensors):
            return self._nowhere(f"{len(tensors)} tensors for {len(keys)} pages, or in pieces")
        sizes = [one.numel() * one.element_size() for one in tensors]
        return self._pages(keys, [one.data_ptr() for one in tensors], sizes, pages_at)

    def _pages(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        place: Callable[[Sequence[int], Sequence[int], int, int], Pages],
    ) -> Pages | None:
        shelf = self._shelf
        if shelf is None or not keys:
            return None
        try:
            return place(addresses, sizes, len(keys), shelf.page_bytes)
        except ValueError as error:
            return self._nowhere(str(error))

    def _nowhere(self, why: str) -> Pages | None:
        """None, after it has logged once what stops pages from being moved."""
        if why not in self._complaints and len(self._complaints) < MOST_COMPLAINTS:
            self._complaints.add(why)
            log.error("pages are neither stored nor loaded: %s", why)
        return None

    def _get(self, keys: Sequence[str], pages: Pages | None) -> list[bool]:
        shelf, begun = self._shelf, time.monotonic()
        if shelf is None or pages is None:
            return [False] * len(keys)
        came = shelf.get(keys, pages)
        self._count("prefetch", came.count(True), shelf.page_bytes, begun)
        return came

    def _set(self, keys: Sequence[str], before: Sequence[str], pages: Pages | None) -> list[bool]:
        if not self._config.is_storage_writer:
            return [True] * len(keys)  # another rank stores them
        shelf, begun = self._shelf, time.monotonic()
        if shelf is None or pages is None:
            return [False] * len(keys)
        there = shelf.put(keys, before, pages)
        self._count("backup", there.count(True), shelf.page_bytes, begun)
        return there

    def _count(self, what: str, pages: int, page_bytes: int, begun: float) -> None:
        """Note a transfer for SGLang's metrics, which take pages and GB/s."""
        metrics = self._metrics
        if metrics is not None and pages:
            rate = pages * page_bytes / 1e9 / max(time.monotonic() - begun, 1e-9)
            getattr(metrics, f"{what}_pgs").append(pages)
            getattr(metrics, f"{what}_bandwidth").append(rate)
