"""The old name of `kvrouter_store.connectors.vllm`. The next release removes it."""

import logging

from kvrouter_store.connectors.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]

logging.getLogger("vllm.kvstore").warning(
    "kvstore.connectors.vllm is deprecated: write kvrouter_store.connectors.vllm"
)
