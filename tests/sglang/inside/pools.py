"""SGLang's own host memory of an engine's KV, made of what its device would hold."""

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE_TOKENS = 16
TOKENS = 512 * PAGE_TOKENS
LAYERS = 4
CPU = torch.device("cpu")


def mha_pool(layout: str, dtype: torch.dtype) -> MHATokenToKVPoolHost:
    """K and V of two heads."""
    keys, values = _rows(2, 32, dtype), _rows(2, 32, dtype)
    buffers = KVBuffers(
        k=keys,
        v=values,
        k_data_ptrs=_pointers(keys),
        v_data_ptrs=_pointers(values),
        layout=KVBufferLayout.NHD,
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE_TOKENS,
        head_num=2,
        head_dim=32,
        v_head_dim=32,
        dtype=dtype,
        device=CPU,
    )
    return MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
    )


def mla_pool(layout: str, dtype: torch.dtype) -> MLATokenToKVPoolHost:
    """Latents, which all tensor-parallel ranks hold."""
    rows = _rows(1, 80, dtype)
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE_TOKENS,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        kv_cache_dim=80,
        dtype=dtype,
        device=CPU,
    )
    return MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def _rows(heads: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros((TOKENS, heads, width), dtype=dtype) for _ in range(LAYERS))


def _pointers(rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([each.data_ptr() for each in rows], dtype=torch.uint64)
