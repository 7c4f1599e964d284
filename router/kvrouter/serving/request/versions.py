"""Puts a model in the place of an alias, the same one for all requests of a session."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.errors import ApiError
from kvrouter.prefix.session import session_of
from kvrouter.routing.versions import version_of

if TYPE_CHECKING:
    from kvrouter.admission.waiting import EngineWait
    from kvrouter.engines.models import ModelNames
    from kvrouter.engines.pool import EnginePool
    from kvrouter.openai.media import Span
    from kvrouter.openai.request import Request
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics

_MODEL_PART: Final = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\n'


@dataclass(eq=False, slots=True, kw_only=True)
class Versions:
    """Chooses among the models of an alias."""

    pool: EnginePool  # knows which models have an engine now
    models: ModelNames  # knows the aliases
    engine_wait: EngineWait  # where requests wait for an engine of any of them
    session_key: str | None  # the header that names sessions; None: the usual ones alone
    metrics: Metrics  # counts the choices

    async def choose(self, context: RequestContext, alias: str) -> None:
        """Have a request for an alias name one of its models, also in its body.

        Raises:
            ApiError: 503: no engine serves any of them.
        """
        since_s = monotonic()
        model = self._of_those_here(context, alias)
        if model is None:
            model = await self.engine_wait.until(lambda: self._of_those_here(context, alias))
            context.waited(since_s, "engine")
        if model is None:
            raise ApiError(503, "No decode engine is available.", retry_after_s=1)
        self.metrics.aliases[alias, model] += 1
        context.model, context.alias = model, alias
        if model != alias:
            context.request = renamed(context.request, model)

    def _of_those_here(self, context: RequestContext, alias: str) -> str | None:
        """The version of the request's session, among those that have an engine now.

        A request that shows no session, such as a text to complete, has one of its own: texts of
        many users may begin in the same way.
        """
        exchange, weights = context.exchange, self.models.aliases.get(alias, {})
        here = {m: w for m, w in weights.items() if self.pool.serving(exchange.path, m)}
        if len(here) < 2:
            return next(iter(here), None)
        session = session_of(context.request, exchange.headers, self.session_key)
        return version_of(session or context.request_id.encode(), here)


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
