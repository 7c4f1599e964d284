"""The store as a tier below vLLM's own offloading: class KVStoreTier.

vLLM takes the class from this package by its name. Only then is its module imported, which needs
vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrouter_store.connectors.vllm_tier.tier import KVStoreTier

__all__ = ["KVStoreTier"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvrouter_store.connectors.vllm_tier.tier import KVStoreTier  # noqa: PLC0415

    return KVStoreTier
