"""The adapter that LMCache's multiprocess server loads: class KVStoreL2.

LMCache takes the class from this package by its name. Only then is its module imported, which needs
LMCache.
"""

from typing import TYPE_CHECKING

from kvrouter_store.connectors import once_asked

if TYPE_CHECKING:
    from kvrouter_store.connectors.lmcache.adapter import KVStoreL2

__all__ = ["KVStoreL2"]
__getattr__ = once_asked(__name__, "adapter", "KVStoreL2")
