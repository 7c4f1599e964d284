"""The connector that vLLM engines load: class KVStoreConnector.

vLLM takes the class from this package by its name. Only then is its module imported, which needs
vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrouter_store.connectors.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvrouter_store.connectors.vllm.connector import KVStoreConnector  # noqa: PLC0415

    return KVStoreConnector
