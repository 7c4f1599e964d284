"""The names of chunks of vLLM's tiered offloading in the store. Imports no vLLM.

A chunk is what all ranks of an engine hold of some consecutive blocks, side by side in vLLM's own
host memory (vllm/v1/kv_offload/tiering). Only engines that order it alike share it: its layout is
opaque, with all in it that vLLM's own file tier names its folders by (vllm/v1/kv_offload/
file_mapper.py), and the weights besides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvrouter_store.connectors.settings import ConnectorRefused, ConnectorSettings
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.chain import HASH_BYTES
from kvrouter_store.identity.layout import Layout, Scalar
from kvrouter_store.identity.weights import folder_revision

HASH_ALGO = "vllm offload key"  # its first 32 bytes: the chain hash of the chunk's last block
# Of a key of vLLM's (kv_offload/base.py, make_offload_key), without a call of Python for each.
NAME = itemgetter(slice(None, -4))
GROUP = itemgetter(slice(-4, None))
KEY_BYTES = HASH_BYTES + 4
PART = 0  # of a chunk: there is no other
NO_ROOT = "00" * 32  # the seed of a chain is part of each of its hashes


@dataclass(frozen=True)
class ChunkIdentity:
    """What the chunks of an engine are.

    specs: the cache spec of each group that is offloaded, by the group's number in vLLM's keys.
    layout: what decides the order of a chunk's bytes, beside what vLLM tells a tier.
    engine: the engine's name in the store.
    """

    specs: Mapping[int, CacheSpec]
    layout: Mapping[str, Scalar]
    engine: str


def identify(config: Any, settings: ConnectorSettings) -> ChunkIdentity:
    """What can be said by vLLM's OffloadingConfig alone: names have no chain that others compute.

    Raises ConnectorRefused where the weights have no revision that other engines could compare.
    """
    model = settings.model or Path(config.model.name).name
    revision = _revision(config.model.name, settings)
    specs = {
        group.group_id: CacheSpec(
            model=model,
            weights_revision=revision,
            kv_dtype=config.model.dtype,
            block_tokens=group.tokens_per_block * config.cache.blocks_per_chunk,
            hash_algo=HASH_ALGO,
            root=NO_ROOT,
            groups=(f"offloaded group {group.group_id}",),
        )
        for group in config.groups
    }
    return ChunkIdentity(specs, {}, settings.name or f"vllm/{model}/tier")


def chunk_manifests(
    config: Any, chunk_bytes: int, identity: ChunkIdentity, version: str
) -> dict[int, Manifest]:
    """The manifest of each group, by its number; `config`: vLLM's OffloadingConfig.

    Each group has a spec of its own: a chain of one group has gaps that another has not, and the
    store keeps a block for as long as it has blocks that follow it.
    """
    engine = f"vllm-{version.partition('+')[0]}-offload"
    layout = Layout.opaque(engine, {**_fields(config), **identity.layout})
    manifests = {}
    for group in config.groups:
        layers = (0, max(1, len(group.layer_names)))
        part = Part(layers, kv_heads=(0, 1), group=0, block_bytes=chunk_bytes, layout=layout)
        manifests[group.group_id] = Manifest(identity.specs[group.group_id], (part,))
    return manifests


def gpus_of(parallel: Any, groups: int, gpus: int) -> list[tuple[int, int]]:
    """Of each cache group of an engine, which part of how many of this host's GPUs it stands for.

    parallel: vLLM's OffloadingParallelConfig; one process moves the KV of all GPUs of an engine, so
    that data-parallel engines, and the groups of each, share the devices. gpus: of this host.
    """
    engines = parallel.data_parallel_size
    if gpus:
        engines = min(engines, max(1, gpus // parallel.world_size))
    first = parallel.data_parallel_index % engines * groups
    return [(first + group, engines * groups) for group in range(groups)]


def _fields(config: Any) -> dict[str, Scalar]:
    """Everything that decides the order of a chunk's bytes.

    Without the parallel layout where vLLM says that it does not matter.
    """
    cache, parallel = config.cache, config.parallel
    fields: dict[str, Scalar] = {
        "blocks_per_chunk": cache.blocks_per_chunk,
        "canonical": config.canonical_layout,
        "groups": ";".join(
            f"{group.group_id}:{group.tokens_per_block}:{','.join(group.layer_names)}"
            for group in config.groups
        ),
        "kv_cache_layout": str(config.kv_cache_layout),
        "replicated": config.replicated_layout,
        "tokens_per_hash": cache.tokens_per_hash,
    }
    if not (parallel.is_parallelism_agnostic or config.replicated_layout):
        fields |= {
            "context_parallel": f"{parallel.pcp_size},{parallel.dcp_size}",
            "pipeline_parallel": parallel.pp_size,
            "tensor_parallel": parallel.tp_size,
        }
    return fields


def _revision(model: str, settings: ConnectorSettings) -> str:
    """The weights, and where they are files here also the model's options beside them."""
    if settings.weights_revision:
        return settings.weights_revision
    folder = Path(model)
    revision = folder_revision(folder) if folder.is_dir() else ""
    if not revision:
        raise ConnectorRefused(
            f"the weights of {model} have no revision that engines could compare; set "
            '"weights_revision" (such as the commit) in the tier\'s entry of "secondary_tiers"'
        )
    return revision
