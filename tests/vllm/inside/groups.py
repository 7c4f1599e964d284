"""Cache groups made by hand, also of kinds that no CPU backend computes, and what they hold."""

from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCK = 64  # tokens
LAYERS = 2  # of each group


def latent() -> MLAAttentionSpec:
    """DeepSeek's latents, in the layout of their fp8 kernels."""
    return MLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
    )


PAGE = latent().page_size_bytes


HEADS: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.bfloat16,
    "page_size_padded": PAGE,
}
"""Keys and values of two heads, in pages as large as the latents'."""


def full() -> FullAttentionSpec:
    """Attention to all tokens."""
    return FullAttentionSpec(**HEADS)


def window(tokens: int) -> SlidingWindowSpec:
    """Attention to the last tokens."""
    return SlidingWindowSpec(**HEADS, sliding_window=tokens)


def unpadded(spec: Any) -> Any:
    """With pages as large as what is in them."""
    return replace(spec, page_size_padded=None)


def state() -> MambaSpec:
    """A recurrent state, kept where a step ends at the end of a block."""
    return MambaSpec(
        block_size=BLOCK,
        shapes=((4, 64), (2, 32, 32)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=PAGE,
        mamba_cache_mode="align",
    )


def sparse() -> UniformTypeKVCacheSpecs:
    """DeepSeek's sparse attention: latents, and smaller pages of their index."""
    index = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, max_tp_shards=1, head_size=132, dtype=torch.uint8
    )
    return UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"layers.0.0": latent(), "layers.0.1": index}
    )


@dataclass(frozen=True)
class Kind:
    """Cache groups, and how vLLM orders their layers. Several groups overlay each other.

    draft: groups with layers of a draft model. ranks: of each of two engines that share.
    """

    specs: tuple[Any, ...]
    layout: str = "LBHNC"
    draft: tuple[int, ...] = ()
    ranks: tuple[int, int] = (1, 1)

    def of_rank(self, ranks: int) -> "Kind":
        """What one of so many ranks has: a part of the heads, but whole latents."""
        return replace(self, specs=tuple(_of_rank(each, ranks) for each in self.specs))


def _of_rank(spec: Any, ranks: int) -> Any:
    if is_latent(spec) or not hasattr(spec, "num_kv_heads"):
        return spec
    padded = spec.page_size_padded and spec.page_size_padded // ranks
    return replace(spec, num_kv_heads=spec.num_kv_heads // ranks, page_size_padded=padded)


KINDS = {
    "latents": Kind((latent(),)),
    "sparse": Kind((sparse(),)),
    "latents, window, state": Kind((latent(), window(128), state())),
    "two windows": Kind((full(), window(128), window(320))),
    "packed": Kind((latent(), window(128)), layout="BLHNC"),
    "draft": Kind((latent(),), draft=(0,)),
    "draft, window": Kind((latent(), window(128)), draft=(0,)),
    "latents, ranks": Kind((latent(),), ranks=(1, 2)),
    "window, ranks": Kind((unpadded(full()), unpadded(window(128))), ranks=(1, 2)),
}


@dataclass(frozen=True)
class Cache:
    """The cache of one rank: of each layer the view that vLLM makes, and pages without padding."""

    config: KVCacheConfig
    views: dict[str, Any]
    pages: dict[str, Any]


def cached(kind: Kind, blocks: int, ranks: int) -> Cache:
    """The cache of one of so many ranks."""
    kind = kind.of_rank(ranks)
    groups, tensors, views, pages = [], [], {}, {}
    block_bytes = sum(each.page_size_bytes for each in layer_specs(kind.specs[0]))
    raw = torch.zeros(block_bytes * blocks, dtype=torch.int8)
    layout, packed = KVCacheLayout[kind.layout], kind.layout == "BLHNC"
    for number, spec in enumerate(kind.specs):
        names = [f"layers.{number}.{layer}" for layer in range(LAYERS)]
        groups.append(KVCacheGroupSpec(names, spec, is_eagle_group=number in kind.draft))
        offset = 0
        for name, each in zip(names, layer_specs(spec), strict=True):
            page_bytes = each.page_size_bytes
            tensor = KVCacheTensor(
                size=len(raw),
                layers=[name],
                layer_stride=page_bytes * (1 if packed else blocks),
                block_stride=block_bytes if packed else page_bytes,
                offset=offset,
            )
            tensors.append(tensor)
            (views[name],) = create_kv_cache_views(raw, each, blocks, layout, tensor)
            shape = blocks, content_bytes(each)
            pages[name] = raw.as_strided(shape, (tensor.block_stride, 1), offset)
            offset += tensor.layer_stride
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout=kind.layout,
        kv_tp_replicas=ranks if all(map(is_latent, kind.specs)) else 1,
    )
    return Cache(config, views, pages)


def layer_specs(spec: Any) -> list[Any]:
    """The spec of each layer of a group."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec] * LAYERS


def is_latent(spec: Any) -> bool:
    """Whether every rank has the whole of it."""
    return all(isinstance(each, MLAAttentionSpec) for each in layer_specs(spec))


def content_bytes(spec: Any) -> int:
    """Bytes of a page without its padding."""
    if isinstance(spec, MambaSpec):
        return int(spec.state_content_size_bytes)
    return int(spec.unpadded_page_size_bytes)


def read(spec: Any, begin: int) -> range:
    """Whole blocks that a step from token `begin` on reads."""
    size = spec.block_size
    whole = begin // size
    if isinstance(spec, MambaSpec):  # within a block, the state is in the running one
        return range(whole - 1, whole) if begin and begin % size == 0 else range(0)
    if isinstance(spec, SlidingWindowSpec):
        return range(max(0, begin - spec.sliding_window + 1) // size, whole)
    return range(whole)


def written(spec: Any, begin: int, end: int) -> range:
    """Blocks that are whole after a step over these tokens, and were not before."""
    size = spec.block_size
    if isinstance(spec, MambaSpec):  # its state is where the step ends
        return range(end // size - 1, end // size) if end % size == 0 else range(0)
    return range(begin // size, end // size)


def content(spec: Any, block_hash: bytes, layer: str, weights: int, rank: int) -> Any:
    """The bytes of a page of a layer on a rank, whose heads follow those of the ranks before."""
    size = content_bytes(spec)
    first = 0 if is_latent(spec) else rank * size
    return pattern(block_hash, layer, weights)[first : first + size]


@lru_cache(maxsize=4096)
def pattern(block_hash: bytes, layer: str, weights: int) -> Any:
    """The bytes of a page of a layer over all ranks."""
    seed = sha256(block_hash + f"{layer} {weights}".encode()).digest()
    return torch.frombuffer(bytearray(seed * (PAGE // len(seed) + 1)), dtype=torch.int8)
