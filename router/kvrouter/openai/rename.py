"""A request with the name of another model in its body."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from kvrouter.openai.media import Span
    from kvrouter.openai.request import Request


_MODEL_PART: Final = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\n'


def renamed(request: Request, model: str) -> Request:
    """The same request, whose body names `model` instead; `Request.model` stays as asked for."""
    name = orjson.dumps(model) if request.form is None else model.encode()
    given, view = request.spans.get("model"), memoryview(request.body)
    if given is None and request.form is not None:
        start = end = 0
        boundary, _, _ = request.body.partition(b"\r\n")
        before, after = boundary + _MODEL_PART, b"\r\n"
    elif given is None:  # it stands for the only model there was
        start = end = request.body.index(b"{") + 1
        before, after = b'"model":', b"," if request.spans else b""
    else:
        (start, end), before, after = given, b"", b""
    longer = len(before) + len(name) + len(after) - (end - start)

    def moved(span: Span) -> Span:
        if span[0] < start:
            return span
        return span[0] + longer, span[1] + longer

    spans = {key: moved(span) for key, span in request.spans.items()}
    spans["model"] = start + len(before), start + len(before) + len(name)
    prompts = request.prompts
    return replace(
        request,
        body=b"".join((view[:start], before, name, after, view[end:])),
        spans=spans,
        prompts=[moved(span) for span in prompts] if prompts is not None else None,
    )
