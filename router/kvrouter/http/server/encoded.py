"""Decodes request bodies that came compressed (RFC 9110, section 8.4), within the server's bounds.

gzip and deflate, by the standard library. Others are refused: the client learns what is taken.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Final

from kvrouter.errors import ApiError, bad_request
from kvrouter.http.server.limits import FULL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.http.server.exchange import Exchange

HEADER: Final = "content-encoding"
_TAKEN: Final = "gzip, deflate"
_PLAIN: Final = ("", "identity")
_KNOWN: Final = (["gzip"], ["x-gzip"], ["deflate"])
_EITHER_HEAD: Final = 32 + zlib.MAX_WBITS
_READ_BYTES: Final = 16 << 10
_PIECE_BYTES: Final = 256 << 10  # decoded in one turn of the loop: about a millisecond


async def decode(exchange: Exchange) -> None:
    """Put the decoded body in the place of the one that came, and remove the header.

    ApiError: 415: the coding is unknown; 400: the body is broken; 413, 503: it is too large.
    """
    coding = exchange.headers.pop(HEADER)
    named = [name for part in coding.lower().split(",") if (name := part.strip()) not in _PLAIN]
    if not named:
        return
    if named not in _KNOWN:
        message = f"Bodies in {coding[:80]!r} are not read here; send gzip, or plain."
        raise ApiError(415, message, more_headers=(("accept-encoding", _TAKEN),))
    server, size, parts = exchange.channel.server, 0, list[bytes]()
    try:
        for part in _pieces(exchange.body):
            has_room = server.count_body(len(part))
            size += len(part)
            if size > (most := server.limits.body_bytes):
                raise ApiError(413, f"The body is larger than {most} bytes when it is decoded.")
            if not has_room:
                raise ApiError(503, FULL, retry_after_s=1)
            parts.append(part)
            if size > _PIECE_BYTES:
                await asyncio.sleep(0)
    except zlib.error as error:
        why = str(error).rpartition(": ")[2]
        raise bad_request(f"The body is no valid {named[0]}: {why}.") from None
    finally:
        server.count_body(-size)
    exchange.body = b"".join(parts)


def _pieces(body: bytes) -> Iterator[bytes]:
    """What `body` means, in pieces of at most _PIECE_BYTES; zlib.error: it is broken."""
    decoder, view = zlib.decompressobj(_EITHER_HEAD), memoryview(body)
    for at in range(0, len(view), _READ_BYTES):
        rest: bytes | memoryview = view[at : at + _READ_BYTES]
        full = True
        while full or rest:
            piece = decoder.decompress(rest, _PIECE_BYTES)
            rest, full = decoder.unconsumed_tail, len(piece) == _PIECE_BYTES
            yield piece
        if decoder.unused_data:  # another member, which few senders write and many bombs
            raise zlib.error("more follows its end")
    if not decoder.eof:
        raise zlib.error("it ends too early")
