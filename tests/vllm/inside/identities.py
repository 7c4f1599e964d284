"""Identities and refusals by vLLM's real classes; run by the vLLM environment's python.

identities.py FOLDER OTHER_FOLDER: two models of the same shape with different weights. Prints a
JSON object of name to finding; the test that runs this says what each must be.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from kvrouter_store.connectors.vllm.connector import KVStoreConnector, offloading_config
from kvrouter_store.connectors.vllm.identity import identify
from kvrouter_store.connectors.vllm.start import EngineSettings, check_start
from kvrouter_store.connectors.vllm_tier.identity import chunk_manifests

SETTINGS = {"url": "kv://127.0.0.1:1", "cpu_bytes_to_use": 1 << 20, "model": "tiny"}
FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=128
)
STATE = MambaSpec(block_size=32, shapes=((8, 8),), dtypes=(torch.float32,))


def configured(model: str, settings: dict[str, Any] | None = None, **changes: Any) -> VllmConfig:
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
            kv_connector_extra_config={**SETTINGS, **(settings or {})},
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


def who(config: VllmConfig, cache: KVCacheConfig | None = None) -> list[str]:
    """The manifests of an engine, by cache group."""
    cache = cache or cached(FULL)
    transfer = config.kv_transfer_config
    assert transfer is not None
    settings = EngineSettings.parse(transfer.kv_connector_extra_config, "kv_both")
    identity = identify(config, cache, settings)
    offloading = build_offloading_config(offloading_config(config, 1 << 20, identity), cache)
    chunk_bytes = offloading.worker_kv_bytes_per_block * offloading.parallel.world_size
    manifests = chunk_manifests(offloading, chunk_bytes, identity, "0.32.0")
    return [manifest.digest.hex() for manifest in manifests.values()]


def ranked(model: str, ranks: int, **settings: Any) -> list[str]:
    """An engine of so many ranks that have two KV heads together."""
    config = configured(model, settings)
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
    return who(config, cached(dataclasses.replace(FULL, num_kv_heads=2 // ranks)))


def digests(model: str, other: str) -> dict[str, list[str]]:
    """The manifests of an engine, and of others that differ in one thing."""
    base = configured(model)
    os.environ["PYTHONHASHSEED"] = "7"
    seeded = who(base)
    del os.environ["PYTHONHASHSEED"]
    quantised = {}
    if "avx512f" in Path("/proc/cpuinfo").read_text():  # vLLM's fp8 cache needs it
        quantised["quantised"] = who(configured(model, kv_cache_dtype="fp8"))
    return quantised | {
        "base": who(base),
        "same": who(configured(model, max_model_len=2048, max_num_seqs=3)),
        "other weights": who(configured(other)),
        "other dtype": who(configured(model, dtype="bfloat16")),
        "other block size": who(
            configured(model, block_size=64), cached(dataclasses.replace(FULL, block_size=64))
        ),
        "other options": who(configured(model, hf_overrides={"rope_theta": 5000.0})),
        "seeded": seeded,
        "a window in it": who(base, cached(dataclasses.replace(FULL, sliding_window=128))),
        "window": who(base, cached(WINDOW)),
        "another window": who(base, cached(dataclasses.replace(WINDOW, sliding_window=64))),
        "state": who(base, cached(STATE)),
        "full and window": who(base, cached(FULL, WINDOW)),
        "two windows": who(base, cached(WINDOW, WINDOW)),
    }


def ranks(model: str) -> dict[str, list[str]]:
    """Engines of one rank and two, that keep their layout or take the canonical one."""
    return {
        f"{count}{' canonical' if canonical else ''}": ranked(
            model, count, canonical_layout=canonical
        )
        for count in (1, 2)
        for canonical in (False, True)
    }


def start_refusals(model: str) -> dict[str, str]:
    """What an engine that cannot work is told."""
    cases = {
        "defaults": configured(model),
        "hash": configured(model, prefix_caching_hash_algo="sha256"),
        "no prefix caching": configured(model, enable_prefix_caching=False),
        "not causal": configured(model),
    }
    told = {}
    for name, config in cases.items():
        try:
            spec = dataclasses.replace(FULL, non_causal=name == "not causal")
            check_start(config, cached(spec), "0.32.0")
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
        "ranks": ranks(model),
        "start": start_refusals(model),
        "interface": interface(),
    }
    print("\n" + json.dumps(found))
