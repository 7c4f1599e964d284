"""Identities and refusals by vLLM's real classes; run by the vLLM environment's python.

identities.py FOLDER OTHER_FOLDER: two models of the same shape with different weights. Prints a
JSON object of name to finding; the test that runs this says what each must be.
"""

import dataclasses
import json
import os
import sys
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from kvrouter_store.connectors.vllm.connector import KVStoreConnector
from kvrouter_store.connectors.vllm.identity import EngineIdentity, identify, sharing_refusal
from kvrouter_store.connectors.vllm.settings import ConnectorRefused, ConnectorSettings, check_start
from kvrouter_store.connectors.vllm.versions import VERSIONS

SETTINGS = ConnectorSettings(url="kv://127.0.0.1:1", model="tiny")
FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=128
)
STATE = MambaSpec(block_size=32, shapes=((8, 8),), dtypes=(torch.float32,))


def configured(model: str, **changes: Any) -> VllmConfig:
    """vLLM's configuration as the engine's command line makes it."""
    arguments = {
        "model": model,
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 4096,
        "enforce_eager": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "kv_transfer_config": KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvrouter_store.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"url": "kv://127.0.0.1:1"},
        ),
        **changes,
    }
    return EngineArgs(**arguments).create_engine_config()


def cached(*specs: Any, blocks: int = 10) -> KVCacheConfig:
    """A cache of one group per spec, two layers each."""
    tensors = [
        KVCacheTensor(
            size=2 * spec.page_size_bytes * blocks,
            layers=[f"l{group}.0", f"l{group}.1"],
            layer_stride=spec.page_size_bytes * blocks,
            block_stride=spec.page_size_bytes,
        )
        for group, spec in enumerate(specs)
    ]
    groups = [
        KVCacheGroupSpec([f"l{group}.0", f"l{group}.1"], spec) for group, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def who(config: VllmConfig, cache: KVCacheConfig | None = None, parts: int = 0) -> EngineIdentity:
    settings = dataclasses.replace(SETTINGS, parts=parts)
    return identify(config, cache or cached(FULL), settings, VERSIONS[0])


def ranked(model: str, ranks: int, heads: int, parts: int = 0) -> EngineIdentity:
    """An engine of so many ranks with so many KV heads each."""
    config = configured(model)
    config.parallel_config.tensor_parallel_size = ranks
    return who(config, cached(dataclasses.replace(FULL, num_kv_heads=heads)), parts)


def divided(model: str) -> dict[str, Any]:
    """Engines of four KV heads on one, two and four ranks: who has which manifest."""
    cases = {
        "one": ranked(model, 1, 4),
        "two": ranked(model, 2, 2),
        "four": ranked(model, 4, 1),
        "one as two": ranked(model, 1, 4, parts=2),
        "one as four": ranked(model, 1, 4, parts=4),
        "two as four": ranked(model, 2, 2, parts=4),
    }
    try:
        refused = str(ranked(model, 2, 3, parts=4).manifest)
    except ConnectorRefused as error:
        refused = str(error)
    return {
        "digests": {name: one.manifest.digest.hex() for name, one in cases.items()},
        "rank_parts": {name: one.rank_parts for name, one in cases.items()},
        "refused": refused,
    }


def digests(model: str, other: str) -> dict[str, str]:
    """The manifest of an engine, and of others that differ in one thing."""
    base = configured(model)
    replicated = dataclasses.replace(cached(FULL), kv_tp_replicas=2)
    wide = configured(model)
    wide.parallel_config.tensor_parallel_size = 2
    os.environ["PYTHONHASHSEED"] = "7"
    seeded = who(base)
    del os.environ["PYTHONHASHSEED"]
    identities = {
        "base": who(base),
        "same": who(configured(model, max_model_len=2048, max_num_seqs=3)),
        "other weights": who(configured(other)),
        "other dtype": who(configured(model, dtype="bfloat16")),
        "other block size": who(
            configured(model, block_size=64), cached(dataclasses.replace(FULL, block_size=64))
        ),
        "other options": who(configured(model, hf_overrides={"rope_theta": 5000.0})),
        "two ranks": who(wide),
        "two ranks with the same heads": who(wide, replicated),
        "seeded": seeded,
        "refusing": who(base, cached(WINDOW)),
    }
    assert len(identities["two ranks"].manifest.parts) == 2
    assert len(identities["two ranks with the same heads"].manifest.parts) == 1
    return {name: identity.manifest.digest.hex() for name, identity in identities.items()}


def refusals(model: str) -> dict[str, str]:
    """Why KV is not shared, by what the model keeps."""
    config = configured(model)
    caches = {
        "full attention": cached(FULL),
        "sliding window": cached(WINDOW),
        "state": cached(STATE),
        "full and window": cached(FULL, WINDOW),
        "full with a window in it": cached(dataclasses.replace(FULL, sliding_window=128)),
        "not causal": cached(dataclasses.replace(FULL, non_causal=True)),
        "pages of two sizes": cached(FULL),
    }
    caches["pages of two sizes"].kv_cache_tensors[0].size += 1
    return {name: sharing_refusal(config, cache) for name, cache in caches.items()}


def start_refusals(model: str) -> dict[str, str]:
    """What an engine that cannot work is told."""
    cases = {
        "defaults": configured(model),
        "hash": configured(model, prefix_caching_hash_algo="sha256"),
        "no prefix caching": configured(model, enable_prefix_caching=False),
    }
    told = {}
    for name, config in cases.items():
        try:
            check_start(config, "0.32.0")
            told[name] = ""
        except ValueError as error:
            told[name] = str(error)
    return told


def interface() -> dict[str, bool]:
    """Whether the connector is what vLLM expects."""
    own = {name for name in vars(KVStoreConnector) if not name.startswith("_")}
    return {
        "supports several groups": issubclass(KVStoreConnector, SupportsHMA),
        "only overrides what vLLM calls": own
        <= set(dir(KVConnectorBase_V1)) | set(dir(SupportsHMA)),
        "leaves nothing abstract": not KVStoreConnector.__abstractmethods__,
    }


if __name__ == "__main__":
    model, other = sys.argv[1:]
    found = {
        "digests": digests(model, other),
        "refusals": refusals(model),
        "start": start_refusals(model),
        "interface": interface(),
        "divided": divided(model),
    }
    print("\n" + json.dumps(found))
