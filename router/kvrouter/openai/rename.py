"""A request with the name of another model in its body."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from kvrouter.openai.request import Request, Span


def renamed(request: Request, model: str) -> Request:
    """The same request, whose body names `model` instead; `Request.model` stays as asked for."""
    start, end = request.spans["model"]
    name, view = orjson.dumps(model), memoryview(request.body)
    longer = len(name) - (end - start)

    def moved(span: Span) -> Span:
        if span[0] < start:
            return span
        return span[0] + longer, span[1] + longer

    spans = {key: moved(span) for key, span in request.spans.items()}
    spans["model"] = start, end + longer
    prompts = request.prompts
    return replace(
        request,
        body=b"".join((view[:start], name, view[end:])),
        spans=spans,
        prompts=[moved(span) for span in prompts] if prompts is not None else None,
    )
