"""Which session a request belongs to, by its headers or by how it begins."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.openai.request import Request

MOST_BYTES: Final = 64 << 10
"""Of messages, where the user's first is looked for."""
MOST_STANDING: Final = 128 << 10
"""Bytes of each member that stands for all turns."""
MOST_NAME: Final = 1024
"""Bytes of a name."""
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


def session_of(request: Request, headers: Mapping[str, str], header: str | None) -> bytes | None:
    """What is the same for all turns of a session, and other for most others; None: nothing is.

    `header` is asked first, then SESSION_HEADERS, `prompt_cache_key`, and the messages up to the
    first one of the user. Not `user`: it names a person.
    """
    for name in (header, *SESSION_HEADERS) if header else SESSION_HEADERS:
        if value := headers.get(name):
            return value.encode()[:MOST_NAME]
    key = request.raw("prompt_cache_key")
    if key is not None and key[:1] == b'"' and len(key) > len(b'""'):
        return key[:MOST_NAME]
    return _beginning(request)


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
    begun = request.body[span[0] : min(span[1], span[0] + MOST_BYTES)]
    user = begun.find(b'"user"')
    after = begun.find(b'"role"', user + 1) if user >= 0 else -1
    begun = begun[: after if after >= 0 else len(begun)].rstrip(b"\t\n\r ,{}]")
    return blake2b(standing(request) + begun, digest_size=16).digest()
