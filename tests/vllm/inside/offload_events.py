"""What vLLM's offloading publishes of a prompt in host memory, by its own classes.

Prints JSON: the root of its hashes, the message of the prompt in its own cache, and by the blocks
of a chunk, and whether events are described, the messages of a store and of an eviction, as hex.
"""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

BLOCK, BLOCKS = 16, 4
TOKENS = list(range(BLOCK * BLOCKS))


def chain() -> list[Any]:
    kv_cache_utils.init_none_hash(sha256_cbor)
    names: list[Any] = []
    for at in range(0, len(TOKENS), BLOCK):
        parent = names[-1] if names else None
        tokens = TOKENS[at : at + BLOCK]
        names.append(kv_cache_utils.hash_block_tokens(sha256_cbor, parent, tokens))
    return names


def message(*events: Any) -> str:
    batch = KVEventBatch(ts=1.0, events=list(events), data_parallel_rank=0)
    return msgspec.msgpack.encode(batch).hex()


def own_cache(names: list[Any]) -> str:
    """The prompt came into the engine's own cache, and left it."""
    short = [kv_cache_utils.maybe_convert_block_hash(name) for name in names]
    stored = BlockStored(
        block_hashes=short,
        parent_block_hash=None,
        token_ids=TOKENS,
        block_size=BLOCK,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    return message(stored, BlockRemoved(block_hashes=short, medium="GPU", group_idx=0))


def offloaded(names: list[Any], chunk_blocks: int, described: bool) -> list[str]:
    """The prompt comes into host memory; then its room is needed."""
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, described))
    manager = CPUOffloadingManager(len(names) // chunk_blocks, enable_events=True)
    keys = [make_offload_key(name, 0) for name in names[chunk_blocks - 1 :: chunk_blocks]]
    request: Any = SimpleNamespace(block_hashes=names, all_token_ids=TOKENS, lora_request=None)
    group: Any = SimpleNamespace(
        group_idx=0,
        tokens_per_block=BLOCK,
        tokens_per_chunk=chunk_blocks * BLOCK,
        hashes_per_chunk=chunk_blocks,
        kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
        sliding_window_size_in_chunks=None,
    )
    for number, key in enumerate(keys):
        tracker.record_store(request, group, number, key)
    context, other = ReqContext("one"), ReqContext("other")
    manager.on_new_request(context)
    manager.prepare_store(keys, context)
    manager.complete_store(keys, context)
    stored = message(*tracker.take_events(manager.take_events()))
    manager.on_request_finished(context)
    manager.on_new_request(other)
    manager.prepare_store([make_offload_key(b"\7" * 32, 0)], other)
    return [stored, message(*tracker.take_events(manager.take_events()))]


def main() -> None:
    names = chain()
    told: dict[str, Any] = {"own": own_cache(names), "root": kv_cache_utils.NONE_HASH.hex()}
    for blocks, described in ((1, False), (1, True), (2, False), (2, True)):
        told[f"{blocks} {described}"] = offloaded(names, blocks, described)
    print(json.dumps(told))


main()
