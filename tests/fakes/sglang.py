"""SGLang's host memory of pages, and as much of SGLang and torch as the backend imports.

The layouts are those of SGLang's pools of K and V (mem_cache/pool_host/mha.py). Indices are lists
in the place of torch's tensors.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import shake_128
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BACKEND = "kvrouter_store.connectors.sglang.backend"


class Tensor:
    """Flat bytes that a pool hands out."""

    def __init__(self, data: bytes | bytearray, *, contiguous: bool = True) -> None:
        self.data = data if isinstance(data, bytearray) else bytearray(data)
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def numel(self) -> int:
        return len(self.data) // 2

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self._contiguous

    def contiguous(self) -> "Tensor":
        return Tensor(self.data)


class HostPool:
    """Pages of K and V of some layers in one piece of memory, in one of SGLang's layouts."""

    dtype = "torch.bfloat16"
    start_layer = 0

    def __init__(
        self, layout: str = "page_first", pages: int = 64, *, page_size: int = 4, layers: int = 3
    ) -> None:
        self.layout, self.page_size, self.layer_num = layout, page_size, layers
        self.end_layer, self.head_num, self.head_dim = layers, 2, 8
        self.tokens = pages * page_size
        self.token_bytes = self.head_num * self.head_dim * 2  # of K or V in one layer
        self.memory = bytearray(2 * layers * self.tokens * self.token_bytes)
        self.kv_buffer: Tensor | None = Tensor(self.memory)
        self._free = list(range(0, self.tokens, page_size))

    def take(self, pages: int) -> list[int]:
        """The indices of so many pages, not in order of their addresses."""
        starts = [self._free.pop(0) for _ in range(pages)][::-1]
        return [start + token for start in starts for token in range(self.page_size)]

    def get_page_buffer_meta(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """SGLang's own: the addresses and sizes of the pieces of each page."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        half, per_layer = len(self.memory) // 2, self.tokens * self.token_bytes
        found = []
        for start in indices[:: self.page_size]:
            if self.layout == "layer_first":
                for layer in range(self.layer_num):
                    at = base + layer * per_layer + start * self.token_bytes
                    found += [at, at + half]
            else:
                at = base + start * self.layer_num * self.token_bytes
                found += [at, at + half]
        pieces = self.layer_num if self.layout == "layer_first" else 1
        size = self.page_size * self.token_bytes * self.layer_num // pieces
        return found, [size] * len(found)

    def get_dummy_flat_data_page(self) -> Tensor:
        return Tensor(bytes(2 * self.layer_num * self.page_size * self.token_bytes))

    def fill(self, keys: Sequence[str], indices: Sequence[int]) -> None:
        """Give each page what belongs to its key."""
        for key, pieces in zip(keys, self._pages(indices), strict=True):
            data = content_of(key, sum(size for _, size in pieces))
            for address, size in pieces:
                ctypes.memmove(address, data, size)
                data = data[size:]

    def holds(self, keys: Sequence[str], indices: Sequence[int]) -> list[bool]:
        """Of each page, whether it has what belongs to its key."""
        return [
            b"".join(ctypes.string_at(*piece) for piece in pieces)
            == content_of(key, sum(size for _, size in pieces))
            for key, pieces in zip(keys, self._pages(indices), strict=True)
        ]

    def _pages(self, indices: Sequence[int]) -> list[list[tuple[int, int]]]:
        pieces = list(zip(*self.get_page_buffer_meta(indices), strict=True))
        each = len(pieces) * self.page_size // len(indices)
        return [pieces[at : at + each] for at in range(0, len(pieces), each)]


def content_of(key: str, size: int) -> bytes:
    """The bytes that belong to a page."""
    return shake_128(key.encode()).digest(size)


def storage_config(extra: dict[str, Any], **changes: Any) -> SimpleNamespace:
    """SGLang's HiCacheStorageConfig of an engine of one rank."""
    whole: dict[str, Any] = {"extra_config": extra}
    for kind in ("tp", "pp", "attn_cp", "dcp"):
        whole |= {f"{kind}_rank": 0, f"{kind}_size": 1}
    whole |= {"is_mla_model": False, "enable_storage_metrics": False} | changes
    writer = not whole["is_mla_model"] or whole["tp_rank"] == 0
    return SimpleNamespace(**whole, is_storage_writer=writer)


def engine_flags(**changes: Any) -> SimpleNamespace:
    """The flags of an engine that say which model it serves."""
    whole = {
        "model_path": "org/tiny",
        "revision": None,
        "dtype": "auto",
        "json_model_override_args": "{}",
        "kv_cache_dtype": "auto",
        "quantization": None,
        "quantization_param_path": None,
    }
    return SimpleNamespace(**{**whole, **changes})


@contextmanager
def sglang_installed(flags: SimpleNamespace) -> Iterator[type[Any]]:
    """The backend's class, over stand-ins for torch and for the SGLang of an engine."""
    modules: dict[str, dict[str, Any]] = {
        "torch": {
            "arange": lambda count: list(range(count)),
            "cuda": SimpleNamespace(device_count=lambda: 0),
        },
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {"HiCacheStorage": _Storage},
        "sglang.srt.runtime_context": {"get_model": lambda: flags},
        "sglang.srt.observability": {},
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": _Metrics},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, BACKEND, raising=False)
        yield import_module(BACKEND).KVStoreHiCache
        patch.delitem(sys.modules, BACKEND)


class _Storage:
    """SGLang's HiCacheStorage, as far as it does anything."""

    registered: Any = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered = host_pool_name


class _Metrics:
    def __init__(self) -> None:
        self.prefetch_pgs: list[int] = []
        self.backup_pgs: list[int] = []
        self.prefetch_bandwidth: list[float] = []
        self.backup_bandwidth: list[float] = []
