"""Reads what routing needs of a form (multipart/form-data, RFC 7578), and keeps its bytes.

The engine reads the form again. So that both find the same model, for which the caller may have no
right, a form that parsers could read in two ways is refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvrouter.errors import ApiError, bad_request
from kvrouter.openai.media import MEDIUM_TOKENS
from kvrouter.openai.plain import means_true
from kvrouter.openai.request import BYTES_PER_TOKEN, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrouter.openai.media import Span

MULTIPART: Final = "multipart/form-data"
_MOST_PARTS: Final = 256
_MOST_HEAD_BYTES: Final = 4096
_MOST_VALUE_BYTES: Final = 1024
_CHARSET: Final = r'(?:\s*;\s*charset="?utf-8"?)?'
_BOUNDARY: Final = r"""\s*;\s*boundary=("?)([\w'()+,./:=?-]{1,70})\1"""
_KIND: Final = re.compile(MULTIPART + _CHARSET + _BOUNDARY + _CHARSET, re.IGNORECASE | re.ASCII)
_READ: Final = (b"model", b"stream")
_VALUE: Final = rb'"(?:[^"\\\r\n]|\\.)*"|[^\s;"\\]+'
_PARAM: Final = re.compile(rb"\s*;\s*(name|filename\*?)=(%b)" % _VALUE, re.IGNORECASE)
_DISPOSITION: Final = re.compile(
    rb"content-disposition:[ \t]*form-data((?:%b)+)[ \t]*" % _PARAM.pattern, re.IGNORECASE
)


def is_form(content_type: str) -> bool:
    """Whether a Content-Type is that of forms that can hold files."""
    return content_type[: len(MULTIPART)].lower() == MULTIPART


def read_form(body: bytes, content_type: str) -> Request:
    """The request that a form makes; ApiError 400: it is none, or can be read in two ways."""
    kind, files, size = _KIND.fullmatch(content_type.strip()), 0, 0
    if kind is None:
        raise bad_request("The Content-Type of a form must be multipart/form-data; boundary=....")
    found: dict[bytes, Span] = {}
    for name, is_file, span in _parts(body, b"--" + kind[2].encode()):
        files += is_file
        size += 0 if is_file else span[1] - span[0]
        if name in _READ and (is_file or name in found):
            raise _wrong(f"it has more than one `{name.decode()}`, or a file of that name")
        found[name] = span
    model, stream = (_text(body, found.get(name)) for name in _READ)
    spans = {"model": found[b"model"]} if model is not None else {}
    tokens = max(1, files * MEDIUM_TOKENS + size // BYTES_PER_TOKEN)
    asked = stream is not None and means_true(stream)
    form = content_type.encode("latin-1")
    return Request("chat", body, spans, model or None, asked, 0, None, tokens, form=form)


def _parts(body: bytes, mark: bytes) -> Iterator[tuple[bytes, bool, Span]]:
    """Name, whether it is a file, and the place of the value of each part."""
    if not body.startswith(mark):
        raise _wrong("it does not begin with its boundary")
    at, delimiter = len(mark), b"\r\n" + mark
    for _ in range(_MOST_PARTS):
        if body.startswith(b"--", at):
            return
        begin = body.find(b"\r\n\r\n", at, at + _MOST_HEAD_BYTES) + 4
        end = body.find(delimiter, begin)
        if not body.startswith(b"\r\n", at) or begin < 4 or end < 0:
            raise _wrong("a part has no end, or no head")
        yield *_named(body[at + 2 : begin - 4]), (begin, end)
        at = end + len(delimiter)
    raise _wrong(f"it has more than {_MOST_PARTS} parts")


def _named(head: bytes) -> tuple[bytes, bool]:
    """The name of a part, and whether it is a file."""
    lines = head.split(b"\r\n")
    said = [line for line in lines if line[:20].lower().startswith(b"content-disposition")]
    told = _DISPOSITION.fullmatch(said[0]) if len(said) == 1 else None
    params = [(key.lower(), value) for key, value in _PARAM.findall(told[1])] if told else []
    names = dict(params)
    name = names.pop(b"name", b"\\")
    if b"\\" in name or len(names) + 1 < len(params) or any(x[:1] in b" \t" for x in lines):
        raise _wrong("a part has no clear name")
    return name.strip(b'"'), bool(names)


def _text(body: bytes, span: Span | None) -> str | None:
    if span is None:
        return None
    value = body[slice(*span)] if span[1] - span[0] <= _MOST_VALUE_BYTES else b"\xff"
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _wrong("a value is too long, or not UTF-8") from None


def _wrong(why: str) -> ApiError:
    return bad_request(f"The body is not a form that can be served: {why}.")
