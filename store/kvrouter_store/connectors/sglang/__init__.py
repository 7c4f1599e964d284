"""The storage backend that SGLang's HiCache loads: class KVStoreHiCache.

SGLang takes the class from this package by its name. Only then is its module imported, which needs
SGLang.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrouter_store.connectors.sglang.backend import KVStoreHiCache

__all__ = ["KVStoreHiCache"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvrouter_store.connectors.sglang.backend import KVStoreHiCache  # noqa: PLC0415

    return KVStoreHiCache
