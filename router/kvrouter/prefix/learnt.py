"""Names for what prompts begin with, where nobody can tell the names of their blocks.

Some servers name no blocks, and some prompts have no tokens that the router could find. Then what
the client wrote is cut into pieces, which are named in a chain as blocks are. The index learns from
where requests went which engine has which. A match is a guess. So is the session of a request, by
its headers or by how it begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from kvrouter.engines.engine import Engine, HashDomain
from kvrouter.openai.media import with_digests
from kvrouter.openai.request import BYTES_PER_TOKEN, Request
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.prefix.hash_cache import HashCache
    from kvrouter.prefix.in_flight import InFlightPrefixes
    from kvrouter.prefix.index import PrefixIndex

PIECE_TOKENS: Final = 128  # of a piece; text counts as BYTES_PER_TOKEN a token
MOST_BYTES: Final = 1 << 20  # more of a prompt is not compared: it would take the time of others
GROWING: Final = ("messages", "input", "prompt")
"""Members of chats, Anthropic's messages, OpenAI's responses and completions."""
PIECES: Final = HashDomain(PIECE_TOKENS, sha256(b"kvrouter: what clients wrote").digest())
MOST_BEGINNING: Final = 64 << 10  # of messages, where the user's first is looked for
MOST_STANDING: Final = 128 << 10  # bytes of each member that stands for all turns
MOST_NAME: Final = 1024  # bytes of a name
STANDING: Final = ("tools", "system", "instructions")
MESSAGES: Final = ("messages", "input")
"""Members of chats, Anthropic's messages and OpenAI's responses: for all turns, and of turns."""
SESSION_HEADERS: Final = (
    "x-session-id",
    "x-claude-code-session-id",  # Claude Code
    "session-id",  # Codex
    "session_id",  # earlier ones
    "x-session-affinity",  # opencode
    "x-opencode-session",
    "x-amp-thread-id",  # Amp
)
"""Names of a session that clients send by themselves; the first one that is there counts."""


class Learnt(NamedTuple):
    """What is known of a prompt."""

    names: bytes  # of its whole pieces, 32 bytes each
    piece_tokens: int  # of the prompt, for which each of them stands
    guesses: Mapping[Engine, int]  # leading pieces that engines probably hold
    session: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntPrefixes:
    """Finds out what engines may hold of prompts whose block hashes are unknown."""

    hash_cache: HashCache  # names pieces
    index: PrefixIndex  # what requests that have ended left on engines
    in_flight: InFlightPrefixes  # what those that run now will leave there
    session_key: str | None  # the header that names sessions; None: the usual ones alone

    def look(self, request: Request, headers: Mapping[str, str], model: str) -> Learnt:
        """What is known now."""
        names = learnt_names(self.hash_cache, request, model)
        guesses = dict(self.index.match(names))
        for engine, pieces in self.in_flight.match(names).items():
            guesses[engine] = max(pieces, guesses.get(engine, 0))
        session = session_of(request, headers, self.session_key)
        return Learnt(names, tokens_of_pieces(names, request.prompt_tokens), guesses, session)


def learnt_names(cache: HashCache, request: Request, model: str) -> bytes:
    """The chain of a prompt's whole pieces, 32 bytes each. Models and salts have other chains."""
    text = written(request)
    size = PIECE_TOKENS * BYTES_PER_TOKEN
    whole = text[: min(len(text), MOST_BYTES) // size * size]
    return cache.hashes(whole, PIECES, (model, request.kind), request.cache_salt)


def tokens_of_pieces(names: bytes, prompt_tokens: int) -> int:
    """Tokens for which each piece stands: of a longer prompt than is compared, a share of all.

    Engines have the rest of a prompt as they have what is compared, as far as anybody can know.
    """
    pieces = len(names) // HASH_BYTES + 1  # with what is left at the end
    return max(PIECE_TOKENS, prompt_tokens // pieces)


def written(request: Request) -> bytes:
    """What the client wrote, such that a later turn of the same session begins with it.

    What stands for all turns, such as tools; then messages or text as they were sent, or token ids.
    Digests stand for media. MOST_BYTES of it at least, if there are so many.
    """
    if request.ids is not None:
        return request.ids
    grows = next((request.spans[name] for name in GROWING if name in request.spans), None)
    if grows is None:
        return b""
    first, end = grows[0] + 1, grows[1] - 1  # without quotes or brackets
    return standing(request) + with_digests(request.body, first, end, MOST_BYTES)


def session_of(
    request: Request, headers: Mapping[str, str], header: str | None, *, named: bool = False
) -> bytes | None:
    """What is the same for all turns of a session, and other for most others; None: nothing is.

    `header` is asked first, then SESSION_HEADERS, `prompt_cache_key`, and the messages up to the
    first one of the user, unless it must be `named`. Not `user`: it names a person.
    """
    for name in (header, *SESSION_HEADERS) if header else SESSION_HEADERS:
        if value := headers.get(name):
            return value.encode()[:MOST_NAME]
    key = request.raw("prompt_cache_key")
    if key is not None and key[:1] == b'"' and len(key) > len(b'""'):
        return key[:MOST_NAME]
    return None if named else _beginning(request)


def standing(request: Request) -> bytes:
    """What stands for all turns of a session."""
    spans = (request.spans[name] for name in STANDING if name in request.spans)
    return b"".join(request.body[a : min(b, a + MOST_STANDING)] for a, b in spans)


def _beginning(request: Request) -> bytes | None:
    """A digest of what stands, and of the messages before the one that follows the user's first.

    Looks for members `role` without parsing. Where clients write them after the content, a
    session's first turn has another beginning than its later ones.
    """
    span = next((request.spans[name] for name in MESSAGES if name in request.spans), None)
    if span is None:
        return None
    begun = request.body[span[0] : min(span[1], span[0] + MOST_BEGINNING)]
    user = begun.find(b'"user"')
    after = begun.find(b'"role"', user + 1) if user >= 0 else -1
    begun = begun[: after if after >= 0 else len(begun)].rstrip(b"\t\n\r ,{}]")
    return blake2b(standing(request) + begun, digest_size=16).digest()
