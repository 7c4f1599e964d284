"""The connector for every kind of attention and every device that vLLM can offload from.

vLLM takes the class KVStoreConnector from this package by its name. Only then is its module
imported, which needs vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrouter_store.connectors.vllm_offload.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvrouter_store.connectors.vllm_offload.connector import (  # noqa: PLC0415
        KVStoreConnector,
    )

    return KVStoreConnector
