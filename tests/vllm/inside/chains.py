"""Hash chains with vLLM's own code; run by the vLLM environment's python.

Reads a JSON list of {"tokens", "block_tokens", "seed", "lora", "cache_salt"} from stdin and writes
the list of their block hashes (hex).
"""

import json
import os
import sys
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request


def chain(case: dict[str, Any]) -> list[str]:
    """The block hashes of a request as the engine core makes them."""
    os.environ.pop("PYTHONHASHSEED", None)
    if case["seed"] is not None:
        os.environ["PYTHONHASHSEED"] = case["seed"]
    kv_cache_utils.init_none_hash(sha256_cbor)
    lora = case["lora"]
    request = Request(
        request_id="chain",
        prompt_token_ids=case["tokens"],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest(lora[0], 1, lora[1]) if lora else None,
        cache_salt=case["cache_salt"],
        block_hasher=kv_cache_utils.get_request_block_hasher(case["block_tokens"], sha256_cbor),
    )
    return [block_hash.hex() for block_hash in request.block_hashes]


if __name__ == "__main__":
    answer = [chain(case) for case in json.load(sys.stdin)]
    print(json.dumps(answer))
