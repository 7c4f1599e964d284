"""The identity of an engine's KV by cache groups. Touches no KV bytes.

A chunk is what all ranks hold of one block of one group, side by side. Its layout is opaque: it
names all that orders the bytes of any group, so that only engines of the same build, device,
topology and cache configuration share.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from kvrouter_store.connectors.vllm.start import EngineSettings
from kvrouter_store.connectors.vllm.versions import CPU_ISA, HASH_ALGO, HASH_FUNCTION, ROOT_SEED
from kvrouter_store.connectors.vllm.weights import weights_revision
from kvrouter_store.connectors.vllm_tier.identity import ChunkIdentity
from kvrouter_store.identity.block import CacheSpec
from kvrouter_store.identity.chain import root_hash
from kvrouter_store.identity.layout import Scalar

ISA_FLAGS = ("amx_bf16", "amx_tile", "avx2", "avx512_bf16", "avx512_vnni", "avx512f", "fma")
# vLLM's own answers: which groups it offloads, and (scheduler block, hash) sizes in tokens.
GROUPS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.config:get_offloading_group_ids"
BLOCK_SIZES = "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes"


def identify(vllm_config: Any, kv_cache_config: Any, settings: EngineSettings) -> ChunkIdentity:
    """The identity of the engine with these configurations (the scheduler's view of them).

    Raises ConnectorRefused where the weights have no revision that other engines could compare.
    """
    groups = {
        number: _over_ranks(kv_cache_config, number, vllm_config, settings)
        for number in named(GROUPS)(kv_cache_config)
    }
    _, hash_tokens = named(BLOCK_SIZES)(kv_cache_config, vllm_config)
    revision = weights_revision(vllm_config, settings)
    model = settings.model or Path(vllm_config.model_config.model).name
    specs = {
        number: CacheSpec(
            model=model,
            weights_revision=revision,
            kv_dtype=dtype_name(group, vllm_config),
            block_tokens=group.block_size,
            hash_algo=_hash_algo(group.block_size, hash_tokens),
            root=chain_root(),
            groups=(f"{kind_of(group)}, group {number}",),
        )
        for number, group in groups.items()
    }
    engine = settings.name or f"vllm/{model}@{platform.node() or 'localhost'}:{os.getpid()}"
    return ChunkIdentity(specs, _layout(vllm_config, groups), engine)


def _over_ranks(
    kv_cache_config: Any, number: int, vllm_config: Any, settings: EngineSettings
) -> Any:
    """The spec of a group: of one rank, or of all in the canonical layout (latents: one shard)."""
    spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
    if not settings.canonical_layout or not hasattr(spec, "num_kv_heads"):
        return spec
    heads = spec.max_tp_shards or vllm_config.model_config.get_total_num_kv_heads()
    return replace(spec, num_kv_heads=heads)


def _hash_algo(block_tokens: int, hash_tokens: int) -> str:
    """The chain that blocks are named by: a block has the name of its last `hash_tokens` tokens."""
    if hash_tokens == block_tokens:
        return HASH_ALGO
    return f"{HASH_ALGO} by {hash_tokens} tokens"


def _layout(vllm_config: Any, groups: Mapping[int, Any]) -> dict[str, Scalar]:
    """Every field of the groups' specs, and the device that they are for."""
    fields: dict[str, Scalar] = {f"group {number}": repr(group) for number, group in groups.items()}
    fields["cache_dtype"] = str(vllm_config.cache_config.cache_dtype)
    fields["attention_backend"] = str(vllm_config.attention_config.backend)
    device = str(vllm_config.device_config.device_type)
    fields["device"] = f"{device} {_capability()}".strip()
    if device == "cpu":
        fields["machine"] = platform.machine()
        for number, group in groups.items():
            if hasattr(group, "head_size"):  # a recurrent state has none, and one order
                order = cpu_order(vllm_config, group)
                fields |= {f"group {number} {key}": value for key, value in order.items()}
    return fields


def _capability() -> str:
    """Kernels order KV by the generation of the device; '' for a CPU."""
    found = named("vllm.platforms:current_platform").get_device_capability()
    return "" if found is None else str(found.as_version_str())


def dtype_name(spec: Any, vllm_config: Any) -> str:
    """The type of a cache group's elements, such as bfloat16."""
    dtype = getattr(spec, "dtype", None) or vllm_config.model_config.dtype
    return str(dtype).removeprefix("torch.")


def kind_of(spec: Any) -> str:
    """The attention kind of a cache group, by the names that vLLM's own KV events use."""
    kinds = import_module("vllm.v1.kv_cache_interface")
    return str(kinds.get_kv_cache_spec_kind(spec).value)


def cpu_order(vllm_config: Any, spec: Any) -> dict[str, Scalar]:
    """The machine's flags and vLLM's choice by which its CPU kernels order a block of `spec`."""
    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    isa = named(CPU_ISA)(dtype, spec.block_size, spec.head_size, cache_dtype)
    return {"cpu_flags": " ".join(_cpu_flags()), "isa": str(isa)}


def chain_root() -> str:
    """The hash before the first block, as hex; vLLM's own rule is PYTHONHASHSEED or a fixed one."""
    return root_hash(str(named(ROOT_SEED)(named(HASH_FUNCTION)))).hex()


def named(name: str) -> Any:
    """What "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _cpu_flags() -> list[str]:
    """Those flags of this machine's processor that vLLM's CPU kernels are chosen by."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    line = next((row for row in text.splitlines() if row.startswith(("flags", "Features"))), "")
    present = set(line.partition(":")[2].split())
    return [flag for flag in ISA_FLAGS if flag in present]
