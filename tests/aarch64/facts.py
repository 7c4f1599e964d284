"""What both native modules compute, as JSON: equal on every processor. Needs the wheels alone."""

import hashlib
import json
import random

from kvrouter._native import StreamFeed, scan_object
from kvrouter_store._core import copy_crc32c, crc32c
from kvrouter_store.identity.chain import hash_tokens, root_hash

draw = random.Random(7)
data = draw.randbytes(300_001)
copied = bytearray(len(data))
tokens = [draw.randrange(1 << bits) for bits in range(1, 33) for _ in range(40)]
body = json.dumps({"model": "m", "prompt": tokens, "suffix": 'äöü "\\ 🦆' * 20}, ensure_ascii=False)
spans, ids = scan_object(body.encode())
feed = StreamFeed()
piece = b"1c\r\ndata: {}\r\n\r\ndata: [DONE]\r\n\r\n\r\n0\r\n\r\n"

print(
    json.dumps(
        {
            "crc32c": [crc32c(b"123456789"), crc32c(bytes(32)), crc32c(data), crc32c(data[1:99])],
            "copied": [copy_crc32c(copied, data), bytes(copied) == data],
            "chain": [name.hex() for name in hash_tokens(tokens, 16, root=root_hash(None))],
            "spans": spans,
            "ids": hashlib.sha256(ids or b"").hexdigest(),
            "feed": [feed.take(piece) == piece, feed.ended, feed.bad],
        }
    )
)
