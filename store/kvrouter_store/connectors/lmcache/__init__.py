"""The adapter that LMCache's multiprocess server loads: class KVStoreL2.

LMCache takes the class from this package by its name. Only then is its module imported, which needs
LMCache.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrouter_store.connectors.lmcache.adapter import KVStoreL2

__all__ = ["KVStoreL2"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreL2":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvrouter_store.connectors.lmcache.adapter import KVStoreL2  # noqa: PLC0415

    return KVStoreL2
