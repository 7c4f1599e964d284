"""What an engine of a series that was not tested tries before it serves (`allow_untested`).

Each check raises ConnectorRefused where bytes or names are not those that this project expects.
"""

import logging
import os
import random
import time
from typing import Any, Final

import numpy as np
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvrouter_store.connectors.settings import ConnectorRefused
from kvrouter_store.connectors.vllm.identity import chain_root, named
from kvrouter_store.connectors.vllm.versions import HASH_FUNCTION
from kvrouter_store.connectors.vllm_tier.identity import PART
from kvrouter_store.connectors.vllm_tier.tier import KVStoreTier
from kvrouter_store.identity.chain import HASH_BYTES, hash_tokens

log = logging.getLogger("vllm.kvstore")

HASH_BLOCK: Final = "vllm.v1.core.kv_cache_utils:hash_block_tokens"
BLOCK_TOKENS: Final = 16
SOURCE, TARGET = 1, 2  # blocks of the cache that nothing uses yet
WAIT_S: Final = 10.0  # for a rank that writes what another one reads


def check_names() -> None:
    """VLLM names two blocks of a known prompt as this project does."""
    tokens, parent = list(range(2 * BLOCK_TOKENS)), bytes.fromhex(chain_root())
    ours = hash_tokens(tokens, BLOCK_TOKENS, root=parent)
    for number in range(2):
        some = tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
        parent = bytes(named(HASH_BLOCK)(named(HASH_FUNCTION), parent, some, None))
        if len(parent) != HASH_BYTES or parent != ours[number]:
            raise failed("it names blocks in another way")


def check_copies(kv_caches: Any, worker: OffloadingWorker) -> None:
    """One block of each cache group goes to the host memory, and comes back into another block.

    kv_caches: vLLM's CanonicalKVCaches, which hold nothing yet; the two blocks are zeroed after.
    """
    groups = kv_caches.group_data_refs
    for number, refs in enumerate(groups):
        pages = [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
        patterns = [_pattern(number, each, page) for each, page in enumerate(pages)]
        for page, pattern in zip(pages, patterns, strict=True):
            page[SOURCE] = pattern
        sizes = [int(each == number) for each in range(len(groups))]
        came, until = False, time.monotonic() + WAIT_S
        while not came and time.monotonic() < until:
            _copy(worker, sizes, number)
            came = all(
                torch.equal(page[TARGET][: ref.page_size_bytes], pattern[: ref.page_size_bytes])
                for page, pattern, ref in zip(pages, patterns, refs, strict=True)
            )
        for page in pages:
            page[SOURCE], page[TARGET] = 0, 0
        if not came:
            raise failed(f"group {number} did not come back from the host memory as it went there")


def check_store(tier: KVStoreTier) -> None:
    """One chunk of each cache group goes to the store, and comes back. Needs no store to start."""
    chunk = np.asarray(tier._primary_kv_view)[0]
    for group, link in tier.links.items():
        chunk[:] = np.frombuffer(os.urandom(len(chunk)), dtype=chunk.dtype)
        wanted, name = chunk.copy(), os.urandom(HASH_BYTES)
        if link.put(PART, name, range(1), tier.memory, [0]) is None:
            log.warning("the store is away: the self-test leaves it out")
            return
        chunk[:] = 0
        link.get_into(PART, name, range(1), tier.memory, [0])
        if not np.array_equal(chunk, wanted):
            raise failed(f"group {group} did not come back from the store as it went there")
    chunk[:] = 0


def failed(what: str) -> ConnectorRefused:
    """The self-test failed."""
    return ConnectorRefused(
        f'this vLLM was not tested, and the self-test of "allow_untested" failed: {what}; install '
        "a tested series, or a newer kvrouter"
    )


def _pattern(group: int, layer: int, page: Any) -> Any:
    """The bytes of a page, equal on all ranks: those that hold the same heads take turns."""
    content = random.Random(f"{group} {layer}").randbytes(page.shape[1])
    return torch.frombuffer(bytearray(content), dtype=torch.int8).to(page.device)


def _copy(worker: OffloadingWorker, sizes: list[int], chunk: int) -> None:
    """Through the host memory, from block to block."""
    indices, host = [0] * len(sizes), CPULoadStoreSpec([chunk])
    worker.submit_store(0, GPULoadStoreSpec([SOURCE], sizes, indices), host)
    worker.wait({0})
    worker.get_finished()
    worker.submit_load(1, host, GPULoadStoreSpec([TARGET], sizes, indices))
    worker.wait({1})
    worker.get_finished()
