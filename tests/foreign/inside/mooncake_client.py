"""Runs in Mooncake's environment: a client that gives the store memory and puts what it is told.

mooncake_client.py HOST:PORT MASTER   one JSON list of keys a line on stdin; `put` for each
"""

import json
import sys

from mooncake.store import MooncakeDistributedStore

SEGMENT_BYTES = 64 << 20
BUFFER_BYTES = 16 << 20


def main(here: str, master: str) -> None:
    store = MooncakeDistributedStore()
    code = store.setup(here, "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", master)
    assert code == 0, f"setup: {code}"
    print("ready", flush=True)
    for line in sys.stdin:
        codes = [store.put(key, b"kv of " + key.encode()) for key in json.loads(line)]
        assert not any(codes), codes
        print("put", flush=True)
    store.close()


main(*sys.argv[1:])
