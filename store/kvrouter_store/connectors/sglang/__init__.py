"""The storage backend that SGLang's HiCache loads: class KVStoreHiCache.

SGLang takes the class from this package by its name. Only then is its module imported, which needs
SGLang.
"""

from typing import TYPE_CHECKING

from kvrouter_store.connectors import once_asked

if TYPE_CHECKING:
    from kvrouter_store.connectors.sglang.backend import KVStoreHiCache

__all__ = ["KVStoreHiCache"]
__getattr__ = once_asked(__name__, "backend", "KVStoreHiCache")
