"""What the pages of one rank of an engine are. Imports no SGLang, and touches no bytes of KV.

SGLang's keys say which tokens a page is of. All else that decides its bytes is in the manifest,
which is opaque: only engines that agree in all of it read each other's pages.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from kvrouter_store.connectors.sglang.settings import HiCacheSettings
from kvrouter_store.identity.blob import blob_manifest
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.layout import Scalar
from kvrouter_store.identity.weights import folder_revision, revision_of

DIALECT = "sglang"
ENGINE_FLAGS = (
    "dtype",
    "json_model_override_args",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
)
"""With which equal weights give other KV (sglang/srt/arg_groups/fields/model.py)."""
POOL_FACTS = (
    "end_layer",
    "head_dim",
    "head_num",
    "kv_cache_dim",
    "kv_lora_rank",
    "layer_num",
    "layout",
    "page_size",
    "qk_rope_head_dim",
    "start_layer",
    "storage_format_tag",
    "target_layer_num",
    "v_head_dim",
)
"""What SGLang's host pools say of a page, as far as they have it (mem_cache/pool_host/)."""


def model_of(flags: Any, settings: HiCacheSettings) -> tuple[str, str]:
    """The model's name, and the revision of its weights. `flags`: the engine's.

    Raises ConnectorRefused where engines could not compare the weights.
    """
    path, revision = flags.model_path, settings.weights_revision
    revision = revision or revision_of(path, flags.revision, folder_revision)
    if not revision:
        raise settings.refused(
            f"the weights of {path} have no revision that engines could compare; set "
            '"weights_revision", or --revision to the commit'
        )
    return settings.model or Path(path).name, revision


def engine_facts(flags: Any, config: Any) -> dict[str, Scalar]:
    """What of the engine decides a page's bytes, and which part of each page this rank holds.

    config: SGLang's HiCacheStorageConfig. Tensor-parallel ranks of MLA hold all the same.
    """
    facts: dict[str, Scalar] = {name: str(getattr(flags, name)) for name in ENGINE_FLAGS}
    for kind in ("pp", "attn_cp", "dcp") if config.is_mla_model else ("tp", "pp", "attn_cp", "dcp"):
        rank, size = getattr(config, f"{kind}_rank"), getattr(config, f"{kind}_size")
        facts[kind] = f"{rank} of {size}"
    return facts


def pool_facts(pool: Any) -> dict[str, Scalar]:
    """How SGLang's host pool orders the bytes of a page. `pool`: its HostKVCache."""
    facts: dict[str, Scalar] = {
        name: value
        for name in POOL_FACTS
        if isinstance(value := getattr(pool, name, None), int | str)
    }
    return {**facts, "stored_dtype": str(pool.dtype), "pool": type(pool).__name__}


def manifest_of(
    model: tuple[str, str], sizes: Sequence[int], facts: Mapping[str, Scalar]
) -> Manifest:
    """The manifest of pages whose pieces have these sizes in bytes, in this order."""
    name, revision = model
    pieces = " ".join(f"{len(list(run))}x{size}" for size, run in groupby(sizes))
    whole = {**facts, "weights_revision": revision, "pieces": pieces}
    return blob_manifest(DIALECT, name, sum(sizes), whole)
