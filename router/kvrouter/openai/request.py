"""Reads what routing needs of an OpenAI request, and keeps its bytes.

Rules and wording follow vllm/entrypoints/openai/{completion,chat_completion}/protocol.py of
vLLM 0.32. The engine checks the members that are not read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

import orjson

from kvrouter import _native
from kvrouter.errors import bad_request
from kvrouter.openai.media import Span, text_bytes
from kvrouter.openai.plain import LATER, OddError, in_plain_json

Kind = Literal["completion", "chat"]

_SALT: Final = re.compile(r"[^@/\\\x00]{1,128}")
"""A `cache_salt`, of which backends of caches make names (`validate_cache_salt` of vLLM)."""
BYTES_PER_TOKEN: Final = 4  # bytes of text per token, for an estimate
OPEN_ENDED_TOKENS: Final = 256
"""Tokens that a request without max_tokens is taken to generate: an estimate of work."""
_DEFAULT_COMPLETION_TOKENS: Final = 16
_MAX_DIGITS: Final = 18
_RARE: Final = frozenset({"stream_options", "n", "cache_salt"})
_NO_PROMPT: Final = "Either prompt or prompt_embeds must be provided and non-empty."


@dataclass(slots=True, eq=False)
class Request:
    """One completion or chat request, as far as routing reads it."""

    kind: Kind
    body: bytes  # the client's bytes; but for values that JSON writes otherwise, see `parse`
    spans: dict[str, Span]  # start and end in `body` of the value of each top-level member
    model: str | None  # as asked for
    stream: bool  # whether the client wants server-sent events
    max_tokens: int | None  # None: as many as fit; 0: only the echo of a prompt
    ids: bytes | None  # the prompt's token ids as native uint32, if it was given so
    prompt_tokens: int  # counted if `ids`, else estimated from the prompt's length
    cache_salt: str | None = None  # keeps its blocks apart from others with the same tokens
    n: int = 1  # samples of each prompt
    # Start and end in `body` of each prompt of a list: such a request is served by what
    # `kvrouter.serving.choices.merge.split` makes of it, never as it is.
    prompts: list[Span] | None = None
    path: str | None = None  # of its decode leg, if that is not the one of its kind
    form: bytes | None = None  # Content-Type of a form; `spans` has then its `model` alone

    def raw(self, key: str) -> bytes | None:
        """The JSON of a top-level member; None if it is absent or null."""
        return _raw(self.body, self.spans, key)

    @property
    def text(self) -> str | None:
        """The prompt, if it is a text that tokenizers read with their default special tokens."""
        if self.kind != "completion" or self.ids is not None:
            return None
        raw = self.raw("prompt")
        if raw is None or not raw.startswith(b'"') or "add_special_tokens" in self.spans:
            return None
        text: str = orjson.loads(raw)
        return text


UNREAD: Final = Request("completion", b"", {}, None, False, None, None, 0)
"""Stands for a request whose body has not been read."""


def parse(body: bytes, kind: Kind, max_choices: int) -> Request:
    """Read a body that may ask for `max_choices`, prompts times samples. Raises ApiError (400).

    What engines take for a number or a switch, such as `"16"`, becomes one in the request's body.
    """
    try:
        return _parse(body, kind, max_choices)
    except OddError:
        plain = in_plain_json(body, _native.scan_object(body)[0])
        if plain is None:
            raise
    return _parse(plain, kind, max_choices)


def _parse(body: bytes, kind: Kind, max_choices: int) -> Request:
    try:
        spans, ids = _native.scan_object(body)
    except ValueError as error:
        raise bad_request(f"The body is not a JSON object that can be served: {error}.") from None
    if not LATER.isdisjoint(spans) and (plain := in_plain_json(body, spans, LATER)) is not None:
        return _parse(plain, kind, max_choices)
    model = _text(body, spans, "model")
    stream = _flag(body, spans, "stream") if "stream" in spans else False
    n, salt, prompts = 1, None, None
    if not _RARE.isdisjoint(spans):
        n, salt = _check_rare(body, spans, stream, max_choices)
    if kind == "chat":
        ids = None
        size = _messages_bytes(body, spans) + len(_raw(body, spans, "tools") or b"")
    elif ids is not None:
        size = 0
    else:
        size, prompts = _prompt_bytes(body, spans, max_choices // n)
    counted = len(ids) // 4 if ids is not None else max(1, size // BYTES_PER_TOKEN)
    max_tokens = _max_tokens(body, spans, kind)
    return Request(kind, body, spans, model, stream, max_tokens, ids, counted, salt, n, prompts)


def priority(request: Request) -> int:
    """Its `priority`, 0 by default; the lowest goes first. Raises ApiError (400)."""
    return _count(request.body, request.spans, "priority") or 0


def _check_rare(
    body: bytes, spans: dict[str, Span], stream: bool, max_choices: int
) -> tuple[int, str | None]:
    """Check the members that few requests have; returns the number of samples and the salt."""
    options = _raw(body, spans, "stream_options")
    if options is not None and not stream:
        raise bad_request(
            "Stream options can only be defined when `stream=True`.", "stream_options"
        )
    if options is not None and not options.startswith(b"{"):
        raise bad_request("`stream_options` must be an object.", "stream_options")
    return _samples(body, spans, max_choices), salt_of(body, spans)


def salt_of(body: bytes, spans: dict[str, Span]) -> str | None:
    """Its `cache_salt`. Raises ApiError (400)."""
    raw = _raw(body, spans, "cache_salt")
    if raw is None:
        return None
    return checked_salt(orjson.loads(raw) if raw.startswith(b'"') else None)


def checked_salt(salt: object) -> str:
    """The `cache_salt` itself. ApiError (400): it is none."""
    rule = "a non-empty string if provided."
    if isinstance(salt, str) and salt:
        if _SALT.fullmatch(salt):
            return salt
        rule = "at most 128 characters and must not contain '@', '/', '\\\\', or NUL."
    raise bad_request(f"Parameter 'cache_salt' must be {rule}", "cache_salt")


def _samples(body: bytes, spans: dict[str, Span], max_choices: int) -> int:
    given = _count(body, spans, "n")
    n = 1 if given is None else given
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.", "n")
    if n > max_choices:
        raise bad_request(f"n must be at most {max_choices}, got {n}.", "n")
    return n


def _raw(body: bytes, spans: dict[str, Span], key: str) -> bytes | None:
    span = spans.get(key)
    if span is None:
        return None
    raw = body[span[0] : span[1]]
    return None if raw == b"null" else raw


def _text(body: bytes, spans: dict[str, Span], key: str) -> str | None:
    raw = _raw(body, spans, key)
    if raw is None:
        return None
    if not raw.startswith(b'"'):
        raise bad_request(f"`{key}` must be a string.", key)
    text: str = orjson.loads(raw)
    return text


def _flag(body: bytes, spans: dict[str, Span], key: str) -> bool:
    raw = _raw(body, spans, key)
    if raw is None or raw == b"false":
        return False
    if raw != b"true":
        raise OddError(f"`{key}` must be true or false.", key)
    return True


def _count(body: bytes, spans: dict[str, Span], key: str) -> int | None:
    raw = _raw(body, spans, key)
    if raw is None:
        return None
    if not raw.removeprefix(b"-").isdigit() or len(raw) > _MAX_DIGITS:
        raise OddError(f"`{key}` must be an integer.", key)
    return int(raw)


def _max_tokens(body: bytes, spans: dict[str, Span], kind: Kind) -> int | None:
    count = _count(body, spans, "max_tokens")
    if kind == "chat" and "max_completion_tokens" in spans:
        newer = _count(body, spans, "max_completion_tokens")
        count = count if newer is None else newer
    elif kind == "completion" and count is None:
        count = _DEFAULT_COMPLETION_TOKENS
    least = _count(body, spans, "min_tokens") if "min_tokens" in spans else None
    if count is None:
        return None
    if count < 1 and not (count == 0 and kind == "completion" and _flag(body, spans, "echo")):
        raise bad_request(f"max_tokens must be at least 1, got {count}.", "max_tokens")
    if least is not None and least > max(1, count):  # vLLM computes one token of a mere echo
        raise bad_request(
            f"min_tokens must be less than or equal to max_tokens={max(1, count)}, got {least}.",
            "min_tokens",
        )
    return count


def _messages_bytes(body: bytes, spans: dict[str, Span]) -> int:
    span = spans.get("messages")
    if span is None or body[span[0]] != ord("["):
        raise bad_request("`messages` must be a list of messages.", "messages")
    return text_bytes(body, *span, BYTES_PER_TOKEN)


def _prompt_bytes(
    body: bytes, spans: dict[str, Span], max_prompts: int
) -> tuple[int, list[Span] | None]:
    """Length in bytes of a prompt that is not token ids, and its parts if it is a list."""
    raw = _raw(body, spans, "prompt")
    embeds = _raw(body, spans, "prompt_embeds")
    if raw is None or raw == b'""':
        if embeds is not None:
            return len(embeds), None
        raise bad_request(_NO_PROMPT, "prompt")
    if raw.startswith(b'"'):
        return len(raw) - 2, None
    prompts = _prompts(body, spans["prompt"], max_prompts)
    return len(raw), prompts if embeds is None else None  # embeddings are prompts beside the others


def _prompts(body: bytes, span: Span, max_prompts: int) -> list[Span]:
    """The parts of a list of prompts: all of them texts, or all of them lists."""
    start, end = span
    if body[start] != ord("["):
        raise bad_request("`prompt` must be a text, token ids, or a list of either.", "prompt")
    first = body[start + 1 : end].lstrip()[:1]
    if first == b"]":
        raise bad_request(_NO_PROMPT, "prompt")
    if first not in (b'"', b"["):
        raise OddError("Token ids in `prompt` must be integers of 0 to 4294967295.", "prompt")
    try:
        prompts = _native.scan_array(body, start, end, max_prompts)
    except ValueError:  # the body was scanned before: there are only too many
        message = f"prompt list length exceeds the maximum allowed count of {max_prompts}."
        raise bad_request(message, "prompt") from None
    if any(body[at] != first[0] for at, _ in prompts):
        raise OddError("`prompt` must hold texts alone or lists of token ids alone.", "prompt")
    lists = first == b"["
    if any(to - at == 2 or (lists and body[at + 1 : to - 1].isspace()) for at, to in prompts):
        raise bad_request(_NO_PROMPT, "prompt")
    return prompts
