"""vLLM's real p2p tiers hand over by what the legs of a request carry; run by vLLM's python.

p2p.py HOST PREFILL_PORT DECODE_PORT PREFILL_JSON DECODE_JSON: the ports of two tiers, and the
`kv_transfer_params` of both legs. Two engines' offloading runs here without a device. The decode
engine asks first, as both legs go at once. Prints a JSON object: what it found, and whether the
bytes are those of the prefill engine.
"""

import json
import os
import sys
import time

from tests.vllm.inside.tiering import PATIENCE_S, Engine, content_of, key_of
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import LookupResult, ReqContext

TOKENS = 16
KEYS = [key_of("handed over", index) for index in range(4)]


def leg(engine: Engine, name: str, params: object) -> ReqContext:
    context = ReqContext(name, params)
    for index, key in enumerate(KEYS):
        context.set_offload_key_position(key, (index + 1) * TOKENS)
    engine.manager.on_new_request(context)
    return context


def prefill(engine: Engine, context: ReqContext) -> None:
    """Compute the prompt's chunks and offload them."""
    prepared = engine.manager.prepare_store(KEYS, context)
    for key, chunk in zip(KEYS, prepared.store_spec.chunk_ids, strict=True):
        engine.bytes_of(chunk)[:] = content_of(key)
    engine.manager.complete_store(KEYS, context)


def main(host: str, ports: list[int], sends: object, takes: object) -> dict[str, object]:
    init_none_hash(sha256)
    first, second = (Engine({"type": "p2p", "host": host, "port": port}) for port in ports)
    asked, computed = leg(second, "decode", takes), leg(first, "prefill", sends)
    until, found = time.monotonic() + PATIENCE_S, []
    for step in range(1_000_000):
        found = [second.manager.lookup(key, asked) for key in KEYS]
        if step == 5:
            prefill(first, computed)
            first.manager.on_request_finished(computed)
        first.step()
        second.step()
        first.manager.has_pending_work()
        if all(each is LookupResult.HIT for each in found) or time.monotonic() > until:
            break
        time.sleep(0.001)
    told: dict[str, object] = {"found": [each.name for each in found]}
    loaded = second.manager.prepare_load(KEYS, asked)
    told["same"] = [
        bytes(second.bytes_of(chunk)) == content_of(key)
        for key, chunk in zip(KEYS, loaded.chunk_ids, strict=True)
    ]
    second.manager.complete_load(KEYS, asked)
    second.manager.on_request_finished(asked)
    return told


if __name__ == "__main__":
    host, one, other, sends, takes = sys.argv[1:]
    told = main(host, [int(one), int(other)], json.loads(sends), json.loads(takes))
    print(json.dumps(told), flush=True)
    os._exit(0)  # NIXL's libraries fail when they are unloaded
