"""The kinds of vLLM's cache groups, and a message of its events for each, by its own classes.

Prints JSON: of each kind whether a cache of it keeps the whole history, and its messages, as hex,
in both encodings: as this vLLM's classes have it, and as the arrays of their fields in order.
"""

import json
from typing import Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1 import kv_cache_interface as cache

LAST = {"locality": "LOCAL", "ownership": "o", "session_id": "s"}
"""What optional fields hold, so that arrays have them all."""


def as_array(event: msgspec.Struct) -> list[object]:
    return [type(event).__name__, *msgspec.structs.astuple(event)]


def subclasses(kind: Any) -> list[Any]:
    return [kind] + [each for below in kind.__subclasses__() for each in subclasses(below)]


def filled(made: Any, **values: object) -> Any:
    return made(**values, **{name: LAST[name] for name in made.__struct_fields__ if name in LAST})


def messages(kind: str) -> dict[str, str]:
    events = [
        filled(
            BlockStored,
            block_hashes=[b"\1" * 32, b"\2" * 32],
            parent_block_hash=None,
            token_ids=list(range(32)),
            block_size=16,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None, None],
            group_idx=0,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=1024,
        ),
        filled(BlockRemoved, block_hashes=[b"\2" * 32], medium="GPU", group_idx=0),
        AllBlocksCleared(),
    ]
    batch = {"maps": events, "arrays": [as_array(each) for each in events]}
    encode = msgspec.msgpack.encode
    return {
        encoding: encode(KVEventBatch(ts=1.5, events=each, data_parallel_rank=0)).hex()
        for encoding, each in batch.items()
    }


def main() -> None:
    whole: dict[str, list[bool]] = {each.value: [] for each in cache.KVCacheSpecKind}
    for spec in subclasses(cache.KVCacheSpec):
        kind = "unknown"
        if spec is not cache.UniformTypeKVCacheSpecs:
            kind = cache.get_kv_cache_spec_kind(object.__new__(spec)).value
        whole[kind].append(issubclass(spec, cache.FullAttentionSpec))
    found = {
        kind: {"whole": any(each), "part": not all(each), **messages(kind)}
        for kind, each in whole.items()
    }
    print(json.dumps(found))


main()
