"""The old name of `kvrouter_store.connectors.vllm_tier`. The next release removes it."""

import logging

from kvrouter_store.connectors.vllm_tier.tier import KVStoreTier

__all__ = ["KVStoreTier"]

logging.getLogger("vllm.kvstore").warning(
    "kvstore.connectors.vllm_tier is deprecated: write kvrouter_store.connectors.vllm_tier"
)
