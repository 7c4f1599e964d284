"""The connector that vLLM engines load: class KVStoreConnector.

vLLM takes the class from this package by its name. Only then is its module imported, which needs
vLLM.
"""

from typing import TYPE_CHECKING

from kvrouter_store.connectors import once_asked

if TYPE_CHECKING:
    from kvrouter_store.connectors.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
__getattr__ = once_asked(__name__, "connector", "KVStoreConnector")
