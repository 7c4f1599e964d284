"""The store as a tier below vLLM's own offloading: class KVStoreTier.

vLLM takes the class from this package by its name. Only then is its module imported, which needs
vLLM.
"""

from typing import TYPE_CHECKING

from kvrouter_store.connectors import once_asked

if TYPE_CHECKING:
    from kvrouter_store.connectors.vllm_tier.tier import KVStoreTier

__all__ = ["KVStoreTier"]
__getattr__ = once_asked(__name__, "tier", "KVStoreTier")
