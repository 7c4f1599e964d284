"""Stands in for the kernels that move SGLang's KV between a device and page_first host memory.

Signatures: sgl_kernel/kvcacheio.py. Here the device is a CPU: its buffers are host memory as well.
"""

from ctypes import c_char
from typing import Any

import torch


def transfer_kv_per_layer_pf_lf(
    *,
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    **_: Any,
) -> None:
    """Load one layer of some tokens from host memory."""
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def transfer_kv_all_layer_lf_pf(
    *,
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_: Any,
) -> None:
    """Back up all layers of some tokens; those of the device are given by their addresses."""
    rows = int(src_indices.max()) + 1
    for addresses, host in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, address in enumerate(addresses.tolist()):
            memory = (c_char * (rows * item_size)).from_address(address)
            device = torch.frombuffer(memory, dtype=host.dtype).view(rows, *host.shape[2:])
            host[dst_indices, layer] = device[src_indices]
