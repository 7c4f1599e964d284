"""Names for what prompts begin with, where nobody can tell the names of their blocks.

Some servers name no blocks, and some prompts have no tokens that the router could find. Then what
the client wrote is cut into pieces, which are named in a chain as blocks are. The index learns from
where requests went which engine has which. A match is a guess.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import HashDomain
from kvrouter.openai.request import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from kvrouter.openai.request import Request
    from kvrouter.prefix.hash_cache import HashCache

PIECE_TOKENS: Final = 128
"""Of a piece; text counts as BYTES_PER_TOKEN a token."""
PIECES: Final = HashDomain(PIECE_TOKENS, sha256(b"kvrouter: what clients wrote").digest())


def learnt_names(cache: HashCache, request: Request, model: str) -> bytes:
    """The chain of a prompt's whole pieces, 32 bytes each. Models and salts have other chains."""
    text = written(request)
    size = PIECE_TOKENS * BYTES_PER_TOKEN
    whole = text[: len(text) // size * size]
    return cache.hashes(whole, PIECES, (model, request.kind), request.cache_salt)


def written(request: Request) -> bytes:
    """What the client wrote, such that a later turn of the same session begins with it.

    Of a chat the tools, which templates put first, and the messages as they were sent; of a
    completion the token ids or the text.
    """
    if request.ids is not None:
        return request.ids
    if request.kind == "chat":
        start, end = request.spans["messages"]
        return (request.raw("tools") or b"") + request.body[start + 1 : end - 1]
    return (request.raw("prompt") or b"")[1:-1]
