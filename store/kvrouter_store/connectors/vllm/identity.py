"""The identity of a vLLM engine's KV: cache spec, layout and manifest. Touches no KV bytes.

Two engines share blocks only where all of this agrees. In doubt an engine runs without sharing, and
`sharing_refusal` says why.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from kvrouter_store.connectors.vllm.settings import ConnectorRefused, ConnectorSettings
from kvrouter_store.connectors.vllm.versions import VllmFacts
from kvrouter_store.identity.block import CacheSpec, Manifest, Part, canonical_json
from kvrouter_store.identity.chain import root_hash
from kvrouter_store.identity.layout import Layout, Scalar

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
MAX_HASHED_BYTES = 2 << 30  # larger checkpoints would delay the start by more than seconds
ISA_FLAGS = ("amx_bf16", "amx_tile", "avx2", "avx512_bf16", "avx512_vnni", "avx512f", "fma")
# Their positions are scaled by lengths that are set per engine, not by the weights alone.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class EngineIdentity:
    """An engine's manifest, why its KV is not shared ('' where it is), and its name in the store.

    `replicas`: consecutive ranks that hold the same heads; the first of them saves them.
    `rank_parts`: parts of the manifest that a rank holds.
    """

    manifest: Manifest
    refusal: str
    engine: str
    replicas: int = 1
    rank_parts: int = 1

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self.manifest.spec.block_tokens


def identify(
    vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, facts: VllmFacts
) -> EngineIdentity:
    """The identity of the engine with these configurations (the scheduler's view of them).

    Raises ConnectorRefused where the weights have no revision that other engines could compare.
    """
    groups = kv_cache_config.kv_cache_groups
    spec = CacheSpec(
        model=settings.model or Path(vllm_config.model_config.model).name,
        weights_revision=weights_revision(vllm_config, settings),
        kv_dtype=dtype_name(groups[0].kv_cache_spec, vllm_config),
        block_tokens=vllm_config.cache_config.block_size,
        hash_algo=facts.hash_algo,
        root=chain_root(facts),
        groups=tuple(kind_of(group.kv_cache_spec) for group in groups),
    )
    engine = settings.name or f"vllm/{spec.model}@{platform.node() or 'localhost'}:{os.getpid()}"
    refusal = sharing_refusal(vllm_config, kv_cache_config)
    replicas = kv_cache_config.kv_tp_replicas
    if refusal:
        return EngineIdentity(
            Manifest(spec, _refused_parts(groups, engine)), refusal, engine, replicas
        )
    ranks = vllm_config.parallel_config.tensor_parallel_size // replicas
    layout = _engine_fingerprint(vllm_config, facts, groups)
    parts = _parts(groups[0], ranks, settings.parts or ranks, layout)
    return EngineIdentity(Manifest(spec, parts), refusal, engine, replicas, len(parts) // ranks)


def sharing_refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine's KV is not shared, or ''. Only plain full attention is known to be safe.

    A sliding window or a recurrent state keeps no whole prefix; several groups have block ids that
    mean different things; a draft model's KV and dynamic quantisation scales are outside the spec.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(kind_of(group.kv_cache_spec) for group in groups)
        return f"the model has {len(groups)} cache groups ({kinds}); only one can be shared"
    group, spec = groups[0], groups[0].kv_cache_spec
    if type(spec).__name__ != "FullAttentionSpec":
        return f"the model keeps {kind_of(spec)} KV; only full_attention is shared"
    speculative = vllm_config.speculative_config
    drafts = group.is_eagle_group or (speculative is not None and speculative.method != "ngram")
    held = len(group.layer_names) * spec.page_size_bytes * kv_cache_config.num_blocks
    doubts = (
        (spec.non_causal, "attention is not causal: a prefix's KV depends on what follows it"),
        (
            spec.block_size != vllm_config.cache_config.block_size,
            "the cache group's block size is not the engine's",
        ),
        (spec.kv_quant_mode.value != 0, "quantised KV has scales that are not part of a block"),
        (drafts, "speculative decoding keeps KV of a draft model among the blocks"),
        (
            {tensor.size for tensor in kv_cache_config.kv_cache_tensors} != {held},
            "the layers' pages differ in size",
        ),
    )
    return next((reason for doubt, reason in doubts if doubt), "")


def weights_digest(folder: Path) -> str:
    """A digest over the weight files of a local model, or '' where there are none or too much."""
    files = sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    if not files or sum(path.stat().st_size for path in files) > MAX_HASHED_BYTES:
        return ""
    total = sha256()
    for path in files:
        total.update(canonical_json([path.name, path.stat().st_size]))
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                total.update(chunk)
    return total.hexdigest()


def weights_revision(vllm_config: Any, settings: ConnectorSettings) -> str:
    """What decides the KV of a token chain: weights, their dtype, model options."""
    model = vllm_config.model_config
    local = Path(model.model)
    weights = settings.weights_revision
    if not weights:
        weights = weights_digest(local) if local.is_dir() else (model.revision or "")
    if not weights:
        raise ConnectorRefused(
            f"the weights of {model.model} have no revision that engines could compare; set "
            '"weights_revision" (such as the commit) in kv_connector_extra_config'
        )
    options = _model_options(model.hf_config.to_dict())
    if _rope_type(options) in LENGTH_DEPENDENT_ROPE:
        options["max_model_len"] = model.max_model_len
    facts = [weights, options, str(model.dtype), str(model.quantization)]
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _model_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's configuration without where and by which program it was written."""
    volatile = ("_name_or_path", "transformers_version", "_commit_hash", "torch_dtype", "dtype")
    return {key: value for key, value in config.items() if key not in volatile}


def _rope_type(options: Mapping[str, Any]) -> str:
    rope = options.get("rope_parameters") or options.get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "")


def dtype_name(spec: Any, vllm_config: Any) -> str:
    """The type of a cache group's elements, such as bfloat16."""
    dtype = getattr(spec, "dtype", None) or vllm_config.model_config.dtype
    return str(dtype).removeprefix("torch.")


def kind_of(spec: Any) -> str:
    """The attention kind of a cache group, by the names that vLLM's own KV events use."""
    kinds = import_module("vllm.v1.kv_cache_interface")
    return str(kinds.get_kv_cache_spec_kind(spec).value)


def _parts(group: Any, ranks: int, parts: int, layout: Layout) -> tuple[Part, ...]:
    """All layers of the one group, its KV heads divided evenly: so many parts of as many ranks.

    Raises ConnectorRefused where the heads of a rank cannot be divided so.
    """
    spec, layers = group.kv_cache_spec, len(group.layer_names)
    heads = ranks * spec.num_kv_heads
    able = [count for count in range(ranks, heads + 1, ranks) if heads % count == 0]
    if parts not in able:
        raise ConnectorRefused(
            f'"parts" in kv_connector_extra_config is {parts}, and {heads} KV heads of {ranks} '
            f"ranks can be divided into {' or '.join(map(str, able))}"
        )
    each = heads // parts
    return tuple(
        Part(
            layers=(0, layers),
            kv_heads=(number * each, (number + 1) * each),
            group=0,
            block_bytes=layers * each * _head_bytes(spec),
            layout=layout,
        )
        for number in range(parts)
    )


def _head_bytes(spec: Any) -> int:
    """What one KV head has of a block in one layer."""
    return int(spec.num_states * spec.state_content_size_bytes)


def _refused_parts(groups: Any, engine: str) -> tuple[Part, ...]:
    """Parts that describe what the engine keeps, with nothing stored under them.

    They name the engine, so that no other engine has the same manifest.
    """
    return tuple(
        Part(
            layers=(0, max(1, len(group.layer_names))),
            kv_heads=(0, 1),
            group=index,
            block_bytes=max(1, len(group.layer_names) * group.kv_cache_spec.page_size_bytes),
            layout=Layout.opaque("not shared", {"engine": engine}),
        )
        for index, group in enumerate(groups)
    )


def _engine_fingerprint(vllm_config: Any, facts: VllmFacts, groups: Any) -> Layout:
    """The layout, opaque per head: all that decides how this engine orders a head's bytes.

    The CPU backend packs keys by the instruction set it runs on (vLLM v1/attention/backends/
    cpu_attn.py), so the machine's flags and vLLM's own choice are both part of it. It does so head
    by head: a block of a layer is (heads, tokens, keys and values), whatever heads a rank has.
    """
    spec = groups[0].kv_cache_spec
    version = import_module("vllm").__version__.split("+")[0]
    fields: dict[str, Scalar] = {
        "backend": "cpu_attn",
        "block_tokens": spec.block_size,
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "dtype": str(spec.dtype).removeprefix("torch."),
        **cpu_order(vllm_config, facts, spec),
    }
    engine = f"vllm-{version}-cpu-{platform.machine()}"
    return Layout.per_head(engine, _head_bytes(spec), fields)


def cpu_order(vllm_config: Any, facts: VllmFacts, spec: Any) -> dict[str, Scalar]:
    """The machine's flags and vLLM's choice by which its CPU kernels order a block of `spec`."""
    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    isa = named(facts.cpu_isa)(dtype, spec.block_size, spec.head_size, cache_dtype)
    return {"cpu_flags": " ".join(_cpu_flags()), "isa": str(isa)}


def chain_root(facts: VllmFacts) -> str:
    """The hash before the first block, as hex; vLLM's own rule is PYTHONHASHSEED or a fixed one."""
    return root_hash(str(named(facts.root_seed)(named(facts.hash_function)))).hex()


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
