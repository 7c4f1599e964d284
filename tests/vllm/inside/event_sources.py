"""What vLLM says of its publishers of KV events, and publishes while it looks ahead of its blocks.

    python event_sources.py SEED STEPS

Prints JSON: the answer to GET /kv_event_sources of two ranks, whose publishers bind; that without
publishers; and steps of a cache whose hashes cover the token after each block, as those of draft
layers do: its message, as hex, and how many leading blocks of each prompt the cache has then.
"""

import json
import os
import random
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.entrypoints.serve.instrumentator.basic import router
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK = 4
LOOKAHEAD = 1
os.environ["VLLM_HOST_IP"] = "127.0.0.1"  # where a publisher at port 0 binds


def told(sources: dict[int, Any]) -> Any:
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = SimpleNamespace(get_kv_event_sources=lambda: sources)
    answer = TestClient(app).get("/kv_event_sources")
    assert answer.status_code == 200
    return answer.json()


def publishers() -> dict[str, Any]:
    made = [
        ZmqEventPublisher(rank, "tcp://*:0", "tcp://*:0", topic="kv", buffer_steps=9)
        for rank in (0, 1)
    ]
    fixed = ZmqEventPublisher(0, "inproc://events")
    try:
        sources = {rank: each.get_publisher_config() for rank, each in enumerate(made)}
        return {"two": told(sources), "inproc": told({0: fixed.get_publisher_config()})}
    finally:
        for each in (*made, fixed):
            each.shutdown()


class Cache:
    """A pool of few blocks, and requests that are computed one after the other."""

    def __init__(self) -> None:
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor, LOOKAHEAD)
        self._pool = BlockPool(
            16, True, BLOCK, enable_kv_cache_events=True, num_hash_lookahead_tokens=LOOKAHEAD
        )

    def _request(self, prompt: list[int]) -> Request:
        parameters = SamplingParams(max_tokens=1)
        return Request("r", prompt, parameters, None, block_hasher=self._hasher, session_id="s")

    def _hits(self, request: Request) -> list[Any]:
        found = []
        for each in request.block_hashes:
            block = self._pool.get_cached_block(each, [0])
            if block is None:
                break
            found += block
        return found

    def hits(self, prompt: list[int]) -> int:
        return len(self._hits(self._request(prompt)))

    def compute(self, prompt: list[int]) -> str:
        pool, request = self._pool, self._request(prompt)
        hits = self._hits(request)
        pool.touch(hits)
        blocks = hits + pool.get_new_blocks(-(-len(prompt) // BLOCK) - len(hits))
        full = len(request.block_hashes)
        if full > len(hits):
            pool.cache_full_blocks(request, blocks, len(hits), full, BLOCK, 0)
        pool.free_blocks(reversed(blocks))
        batch = KVEventBatch(ts=1.0, events=pool.take_events(), data_parallel_rank=0)
        return msgspec.msgpack.encode(batch).hex()


def main() -> None:
    seed, steps = map(int, sys.argv[1:])
    drawn, cache = random.Random(seed), Cache()
    prompts = [
        [*range(1, 1 + 4 * drawn.randrange(3)), *(drawn.randrange(2) for _ in range(13))]
        for _ in range(20)
    ]
    walked = []
    for _ in range(steps):
        message = cache.compute(drawn.choice(prompts))
        walked.append({"message": message, "hits": [cache.hits(each) for each in prompts]})
    walk = {"block": BLOCK, "prompts": prompts, "steps": walked}
    print(json.dumps({**publishers(), "none": told({}), "walk": walk}))


main()
