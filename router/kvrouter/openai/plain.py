"""Numbers, switches and token ids that JSON would write otherwise, as pydantic reads them.

vLLM and SGLang read bodies by pydantic's lax rules: `"16"` and `16.0` are integers, `1` and `"yes"`
are true. Pydantic itself reads them here, by the same rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
from pydantic import Field, TypeAdapter

from kvrouter.errors import ApiError
from kvrouter.http.bounded_json import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from kvrouter.openai.media import Span

LATER: Final = frozenset(
    ("echo", "priority", "return_token_ids", "seed", "truncate_prompt_tokens", "use_beam_search")
)
"""Members that the router reads when the request is under way; engines check them."""
_FLAGS: Final = frozenset(("background", "echo", "return_token_ids", "stream", "use_beam_search"))
_COUNTS: Final = ("max_tokens", "max_completion_tokens", "min_tokens", "n", *(LATER - _FLAGS))
_FLAG: Final = TypeAdapter(bool)
_Ids = list[Annotated[int, Field(ge=0)]]
_READERS: Final[Mapping[str, TypeAdapter[Any]]] = {
    **dict.fromkeys(_COUNTS, TypeAdapter(int)),
    **dict.fromkeys(_FLAGS, _FLAG),
    "prompt": TypeAdapter(_Ids | list[_Ids] | list[str] | str),
}


class OddError(ApiError):
    """A 400, unless pydantic knows what the value means."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(400, message, param=param)


def in_plain_json(
    body: bytes, spans: Mapping[str, Span], names: Set[str] = _READERS.keys()
) -> bytes | None:
    """The object with these members as JSON writes them; None: they are so, or mean nothing."""
    parts, at = list[bytes](), 0
    for name in sorted(names & spans.keys(), key=spans.__getitem__):
        start, end = spans[name]
        plain = _plain(body[start:end], _READERS[name])
        if plain is not None:
            parts += (body[at:start], plain)
            at = end
    return b"".join((*parts, body[at:])) if parts else None


def means_true(text: str) -> bool:
    """Whether a text is a switch that is on."""
    try:
        return _FLAG.validate_python(text)
    except ValueError:
        return False


def _plain(raw: bytes, reader: TypeAdapter[Any]) -> bytes | None:
    """The JSON of what `raw` means, if that is other JSON."""
    usual = raw in (b"true", b"false") if reader is _FLAG else raw.isdigit()
    if usual or raw == b"null":
        return None
    try:
        given = orjson.loads(bounded(raw))
        plain = orjson.dumps(reader.validate_python(given))
    except (ValueError, TypeError):  # no such value, too many of them, or more than 64 bits
        return None
    return plain if plain != orjson.dumps(given) else None
