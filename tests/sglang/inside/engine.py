"""The cache of an SGLang engine, without the engine: its own host pool, factory and controller.

Run by the SGLang environment's python. Each line of its input is a JSON list, a command's name and
its arguments; each line of its output the command's answer. It ends with its input.
"""

import json
import sys
from hashlib import shake_128
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from transformers import AutoProcessor  # noqa: F401 (it looks for torchvision: without a stand-in)

sys.path.append(str(Path(__file__).parents[1] / "stubs"))

from sglang.srt.managers.cache_controller import (
    HiCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_context
from tests.sglang.inside.pools import PAGE_TOKENS, mha_pool, mla_pool

from kvrouter_store.connectors.sglang.pages import PoolMemory
from kvrouter_store.rdma.memory import spans_of

RANKS = ("tp", "pp", "attn_cp")


class Engine:
    """One rank's host pool, and the storage backend that SGLang's factory made for it."""

    def __init__(
        self,
        extra: dict[str, Any],
        layout: str,
        dtype: str,
        changes: dict[str, Any],
        flags: dict[str, Any],
    ) -> None:
        pool = mla_pool if changes.get("is_mla_model") else mha_pool
        self.pool = pool(layout, getattr(torch, dtype))
        ranks = {f"{one}_{what}": k for one in RANKS for k, what in enumerate(("rank", "size"))}
        whole = {
            **ranks,
            "is_mla_model": False,
            "enable_storage_metrics": True,
            "is_page_first_layout": layout == "page_first",
            "model_name": "served",
            "extra_config": extra,
            **changes,
        }
        with get_context().override_server_args(**{"model_path": "org/tiny", **flags}):
            self.backend = StorageBackendFactory.create_backend(
                "dynamic", HiCacheStorageConfig(**whole), self.pool
            )
        self.backend.register_mem_pool_host(self.pool)
        self.backend.register_mem_host_pool_v2(self.pool, PoolName.KV)
        self.backend.on_host_pools_registered()
        self.controller = controller_of(self.pool, self.backend, bool(extra.get("interface_v1")))

    def set(self, keys: list[str], prefix: list[str] | None) -> bool:
        """Compute pages, each with what belongs to its key, and have them stored in one call."""
        indices = self._computed(keys)
        extra = HiCacheStorageExtraInfo(prefix)
        done = self.controller.page_set_func(keys, indices, extra)
        self.pool.free(indices)
        return bool(done)

    def get(self, keys: list[str]) -> list[str]:
        """Have pages loaded in one call: of each, whether it is 'right', 'wrong' or 'missing'."""
        indices = self.pool.alloc(len(keys) * PAGE_TOKENS)
        operation = PrefetchOperation("request", [])
        found = self.controller.page_get_func(operation, keys, indices, HiCacheStorageExtraInfo())
        return self._seen(keys, indices, found)

    def back_up(self, seed: int, pages: int) -> int:
        """Have a prompt stored, as a thread of SGLang does; how many pages it says are."""
        keys = page_keys(seed, pages)
        indices = self._computed(keys)
        operation = StorageOperation(
            indices, tokens_of(seed, pages), hash_value=keys, prefix_keys=[]
        )
        self.controller._page_backup(operation)
        self.pool.free(indices)
        return int(operation.completed_tokens // PAGE_TOKENS)

    def prefetch(self, seed: int, pages: int) -> list[str]:
        """Have a prompt looked up and loaded, as threads of SGLang do; what the pages found are."""
        operation = PrefetchOperation("request", tokens_of(seed, pages), prefix_keys=[])
        operation.hash_value, _ = self.controller._storage_hit_query(operation)
        operation.host_indices = self.pool.alloc(len(operation.hash_value) * PAGE_TOKENS)
        found = self.controller._page_transfer(operation)
        return self._seen(page_keys(seed, pages)[:found], operation.host_indices, found)

    def registered(self) -> bool:
        """Whether an RDMA device that has registered any page of the pool has it all."""
        memory, buffer = PoolMemory.of(self.pool), self.pool.kv_buffer
        found = set()
        for count in (1, 7):
            indices = self.pool.alloc(count * PAGE_TOKENS)
            addresses, sizes = self.pool.get_page_buffer_meta(indices)
            pages = memory.pages_at(addresses, sizes, count, sum(sizes) // count)
            found.add(pages.segments)
            self.pool.free(indices)
        (segments,) = found
        start = buffer.data_ptr()
        return spans_of(segments, segments.blocks or 0) == [(start, start + buffer.nbytes)]

    def _computed(self, keys: list[str]) -> torch.Tensor:
        indices = self.pool.alloc(len(keys) * PAGE_TOKENS)
        for key, page in zip(keys, indices[::PAGE_TOKENS].tolist(), strict=True):
            self.pool.set_from_flat_data_page(page, self._content(key))
        return indices

    def _seen(self, keys: list[str], indices: torch.Tensor, found: int) -> list[str]:
        seen = ["missing"] * len(keys)
        for k, key in enumerate(keys[:found]):
            loaded = self.pool.get_data_page(int(indices[k * PAGE_TOKENS]))
            # As numbers, some are equal to nothing.
            same = torch.equal(loaded.view(torch.uint8), self._content(key).view(torch.uint8))
            seen[k] = "right" if same else "wrong"
        self.pool.free(indices)
        return seen

    def _content(self, key: str) -> torch.Tensor:
        page = self.pool.get_dummy_flat_data_page()
        data = shake_128(key.encode()).digest(page.numel() * page.element_size())
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(page.dtype)


def controller_of(pool: Any, backend: Any, by_address: bool) -> Any:
    """SGLang's controller, as far as it moves pages between host memory and storage."""
    one = HiCacheController.__new__(HiCacheController)
    one.storage_backend, one.storage_host_pool, one.page_size = backend, pool, PAGE_TOKENS
    one.prefetch_sync_queue = Queue()
    one.page_get_func = one._page_get_zero_copy if by_address else one._generic_page_get
    one.page_set_func = one._page_set_zero_copy if by_address else one._generic_page_set
    return one


def tokens_of(seed: int, pages: int) -> list[int]:
    return [seed, *range(pages * PAGE_TOKENS - 1)]


def page_keys(seed: int, pages: int) -> list[str]:
    """The keys of a prompt's pages, by SGLang's own chain."""
    return list(get_hash_str(tokens_of(seed, pages), None, page_size=PAGE_TOKENS))


class Commands:
    """What the test may say: `open` makes an engine by a name, which others begin with."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}

    def keys(self, seed: int, pages: int) -> list[str]:
        return page_keys(seed, pages)

    def open(self, name: str, *made: Any) -> None:
        self._engines[name] = Engine(*made)

    def set(self, name: str, keys: list[str], prefix: list[str] | None) -> bool:
        return self._engines[name].set(keys, prefix)

    def get(self, name: str, keys: list[str]) -> list[str]:
        return self._engines[name].get(keys)

    def back_up(self, name: str, seed: int, pages: int) -> int:
        return self._engines[name].back_up(seed, pages)

    def prefetch(self, name: str, seed: int, pages: int) -> list[str]:
        return self._engines[name].prefetch(seed, pages)

    def registered(self, name: str) -> bool:
        return self._engines[name].registered()

    def exists(self, name: str, keys: list[str]) -> int:
        return int(self._engines[name].backend.batch_exists(keys))

    def add_pool(self, name: str, kind: str) -> None:
        one = self._engines[name]
        one.backend.register_mem_host_pool_v2(one.pool, PoolName(kind))

    def clear(self, name: str) -> None:
        self._engines[name].backend.clear()

    def stats(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = vars(self._engines[name].backend.get_stats())
        return found

    def close(self, name: str) -> None:
        self._engines.pop(name).backend.close()


def main() -> None:
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # what SGLang prints is no answer
    commands = Commands()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"answer": getattr(commands, name)(*arguments)}
        except Exception as error:  # the test says which there may be
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
