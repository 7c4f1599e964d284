"""Media that stand within a request as base64: many bytes, of which engines make few tokens."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

Span = tuple[int, int]  # start and end, in a body, of the value of a member
LEAST_BYTES: Final = 16 << 10  # less counts as text
MEDIUM_TOKENS: Final = 1024
"""Of a medium, an estimate: vision models make some hundreds to some thousands of an image."""
_STEP: Final = LEAST_BYTES // 2
"""Between two places that are looked at: to look at each byte would take as long as all else."""
_LOOKED_AT: Final = 64
_HEAD: Final = 128  # of a data URL, what stands before its base64 is shorter
_DIGESTED: Final = 64 << 10
"""Bytes from its beginning that its digest covers, besides its length: enough for a guess."""


def media(body: bytes, start: int, end: int) -> list[Span]:
    """Where JSON strings of base64 stand in this part of a body, in order."""
    found: list[Span] = []
    at, last, begin = start + _STEP, end - _LOOKED_AT, start
    while at < last:
        if _is_base64(body, at):
            begun, ended = body.rfind(b'"', begin, at) + 1, body.find(b'"', at, end)
            if ended < 0:
                break
            if 0 < begun < ended - LEAST_BYTES and _is_medium(body, begun, ended):
                found.append((begun, ended))
            at = begin = ended  # each string is looked at once
        at += _STEP
    return found


def text_bytes(body: bytes, start: int, end: int, bytes_per_token: int) -> int:
    """The length of this part of a body, if its media were text of as many tokens as they make."""
    each = MEDIUM_TOKENS * bytes_per_token
    return end - start + sum(each - (to - at) for at, to in media(body, start, end))


def with_digests(body: bytes, start: int, end: int, most: int) -> bytes:
    """This part of a body with a digest in place of each medium: `most` bytes of it, if so many."""
    parts, size = [], 0
    for begun, ended in media(body, start, end):
        if size >= most:
            break
        digest = blake2b(
            body[begun : min(ended, begun + _DIGESTED)],
            salt=(ended - begun).to_bytes(blake2b.SALT_SIZE, "big"),
            digest_size=32,
        ).digest()
        parts += [body[start : min(begun, start + most)], digest]
        size += begun - start + len(digest)
        start = ended
    return b"".join((*parts, body[start : min(end, start + most)]))[:most]


def _is_medium(body: bytes, begun: int, ended: int) -> bool:
    places = range(begun + _HEAD, ended - _LOOKED_AT, _STEP)
    if not all(_is_base64(body, at) for at in places):
        return False
    seen = b"".join(body[at : at + _LOOKED_AT] for at in places)
    return seen != seen.lower() and seen != seen.upper()  # such as a long number


def _is_base64(body: bytes, at: int) -> bool:
    return body[at : at + _LOOKED_AT].translate(None, b"+/=_-").isalnum()
