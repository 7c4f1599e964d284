"""Whether vLLM's CPU kernel writes each KV head's bytes together; run by the vLLM environment.

Keys and values of four heads are written at once, and head by head into caches of one. Prints a
JSON object: for each dtype and block size, whether the heads' bytes are the same.
"""

import json

import torch
from vllm._custom_ops import cpu_attn_reshape_and_cache
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

HEADS, HEAD_SIZE, BLOCKS = 4, 64, 3


def written(key: torch.Tensor, value: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """The cache of an engine that has these heads, with every slot written."""
    cache = torch.zeros((BLOCKS, key.shape[1], block_tokens, 2 * HEAD_SIZE), dtype=key.dtype)
    halves = cache.view((BLOCKS, key.shape[1], 2 * block_tokens, -1)).chunk(2, dim=2)
    slots = torch.arange(BLOCKS * block_tokens, dtype=torch.long)
    isa = _get_attn_isa(key.dtype, block_tokens, HEAD_SIZE)
    cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)
    return cache


def same(dtype: torch.dtype, block_tokens: int) -> bool:
    """Whether a head has the same bytes beside others as alone."""
    torch.manual_seed(7)
    key, value = (torch.randn(BLOCKS * block_tokens, HEADS, HEAD_SIZE).to(dtype) for _ in range(2))
    together = written(key, value, block_tokens)
    alone = [
        written(
            key[:, head : head + 1].contiguous(),
            value[:, head : head + 1].contiguous(),
            block_tokens,
        )
        for head in range(HEADS)
    ]
    found = [torch.equal(together[:, head], alone[head][:, 0]) for head in range(HEADS)]
    return all(found) and not torch.equal(together[:, 0], together[:, 1])


found = {
    f"{dtype} {tokens}": same(dtype, tokens)
    for dtype in (torch.float32, torch.bfloat16)
    for tokens in (32, 64)
}
print(json.dumps(found))
