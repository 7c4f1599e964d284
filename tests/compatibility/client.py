"""A client of a store node in any version of the package. Prints what it saw, as JSON.

put URL TRANSPORT: wait for three blocks in one thread, put them in another, put them again.
get URL TRANSPORT: match, get and lease these blocks; a fourth one is not there.
"""

import hashlib
import json
import sys
import threading
from importlib import import_module
from typing import Any

BLOCKS, BLOCK_BYTES, HASH_BYTES = 3, 4096, 32
PATIENCE_S = 20.0


def public(name: str) -> Any:
    """A public name of the store's package, in whichever module this version has it."""
    for module in ("kvstore.client", "kvstore.block", "kvstore._core", "kvrouter_store"):
        try:
            return getattr(import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise AttributeError(name)


def manifest() -> Any:
    spec = public("CacheSpec")("model", "r1", "float32", 16, "sha256_cbor", "11" * 32)
    layout = public("Layout").opaque("compatibility")
    return public("Manifest")(spec, (public("Part")((0, 1), (0, 1), 0, BLOCK_BYTES, layout),))


def chain(blocks: int) -> bytes:
    return b"".join(hashlib.sha256(bytes([k])).digest() for k in range(blocks))


def content(hashes: bytes) -> bytes:
    """The bytes of blocks: a function of their hashes."""
    each = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    return b"".join(hashlib.shake_128(one).digest(BLOCK_BYTES) for one in each)


def put(client: Any) -> dict[str, object]:
    hashes, seen = chain(BLOCKS), dict[str, object]()

    def await_landing() -> None:
        landing = client.wait(manifest(), hashes, BLOCKS, PATIENCE_S, lease=True)
        seen["landed"] = landing.landed and landing.lease.blocks == BLOCKS
        landing.lease.release()

    client.register(manifest(), "engine")
    waiting = threading.Thread(target=await_landing)
    waiting.start()
    segments = public("Segments").over(bytearray(content(hashes)), BLOCK_BYTES, writable=True)
    wanted = manifest(), 0, hashes, range(BLOCKS), segments, list(range(BLOCKS))
    seen["stored"] = client.put(*wanted).stored
    waiting.join()
    seen["existed"] = client.put(*wanted).existed
    return seen


def get(client: Any) -> dict[str, object]:
    hashes = chain(BLOCKS + 1)
    memory = bytearray(len(content(hashes)))
    segments = public("Segments").over(memory, BLOCK_BYTES, writable=True)
    matched = client.match(manifest(), hashes).blocks
    wanted = list(range(BLOCKS + 1))
    client.get_into(manifest(), 0, hashes, range(BLOCKS + 1), segments, wanted)
    with client.acquire(manifest(), hashes) as lease:
        leased = lease.blocks
    right = memory[: BLOCKS * BLOCK_BYTES] == content(hashes[: BLOCKS * HASH_BYTES])
    return {"matched": matched, "leased": leased, "right": right}


def main(what: str, url: str, transport: str) -> None:
    with public("StoreClient")(url, transport=transport, deadline_s=PATIENCE_S) as client:
        seen = {"put": put, "get": get}[what](client)
        print(json.dumps({**seen, "transport": client.transport}))


if __name__ == "__main__":
    main(*sys.argv[1:])
