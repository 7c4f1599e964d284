"""PUT and GET as bytes (csrc/wire/wire.h): clients encode them natively, beside their payloads."""

import struct

from kvrouter_store import _core

__all__ = ["LINE_BYTES", "get_frame", "put_frame"]

HEADER = struct.Struct("<4sBBHQIIQ")
HASH_BYTES = 32
LINE_BYTES = 64  # what follows each block of a PUT; it begins with the CRC32C


def put_frame(
    request_id: int,
    manifest_id: int,
    part: int,
    hashes: bytes,
    block_bytes: int,
    *,
    parent: bytes | None = None,
) -> bytes:
    """Header and body of a PUT, without its payload."""
    blocks = len(hashes) // HASH_BYTES
    body = struct.pack("<IH32sI", manifest_id, part, parent or b"", blocks) + hashes
    return _frame(_core.Op.PUT, request_id, body, (block_bytes + LINE_BYTES) * blocks)


def get_frame(request_id: int, manifest_id: int, part: int, hashes: bytes) -> bytes:
    body = struct.pack("<IHI", manifest_id, part, len(hashes) // HASH_BYTES) + hashes
    return _frame(_core.Op.GET, request_id, body, 0)


def _frame(op: _core.Op, request_id: int, body: bytes, payload_bytes: int) -> bytes:
    body += bytes(-(HEADER.size + len(body)) % 64)
    fields = (b"KVR1", _core.VERSION, op, 0, request_id, len(body), 0, payload_bytes)
    return HEADER.pack(*fields) + body
