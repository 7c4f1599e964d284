"""Puts a model in the place of an alias, the same one for all requests of a session.

Which one: highest random weight. Each version draws a number from the session's name, as often the
lowest as its weight says (Efraimidis and Spirakis, "Weighted random sampling with a reservoir",
2006). So a change of weights moves only the sessions whose share changed, and the sessions of a
version that is away are shared by the others until it is back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from math import log
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.engines.families.splice import splice
from kvrouter.errors import ApiError
from kvrouter.prefix.learnt import session_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.admission.waiting import EngineWait
    from kvrouter.engines.models import ModelNames
    from kvrouter.engines.pool import EnginePool
    from kvrouter.openai.media import Span
    from kvrouter.openai.request import Request
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics

_MODEL_PART: Final = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
_DRAWN_BYTES: Final = 6  # of a drawn number: a float is exact with that many


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


def version_of(session: bytes, weights: Mapping[str, float]) -> str:
    """The version that serves `session`; `weights` are positive, and not empty."""
    return min(weights, key=lambda model: _drawn(session, model) / weights[model])


def _drawn(session: bytes, model: str) -> float:
    """A number above 0, exponentially distributed."""
    digest = blake2b(model.encode() + b"\0" + session, digest_size=_DRAWN_BYTES).digest()
    return -log((int.from_bytes(digest) + 0.5) / 256**_DRAWN_BYTES)


def renamed(request: Request, model: str) -> Request:
    """The same request, whose body names `model` instead; `Request.model` stays as asked for."""
    if request.form is None:
        return with_member(request, "model", orjson.dumps(model))
    name, given = model.encode(), request.spans.get("model")
    if given is not None:
        start, end = given
        before, after = request.body[:start], request.body[end:]
    else:
        boundary, _, _ = request.body.partition(b"\r\n")
        before, after = boundary + _MODEL_PART, b"\r\n" + request.body
    spans = {"model": (len(before), len(before) + len(name))}
    return replace(request, body=b"".join((before, name, after)), spans=spans)


def with_member(request: Request, name: str, raw: bytes) -> Request:
    """`request` with this member in its body, which is JSON; its spans move with the bytes."""
    body, spans = request.body, request.spans
    changed, before = splice(body, spans, {name: raw}), body.index(b"{")
    start, more = spans.get(name, (-1, -1))[0], len(changed) - len(body)

    def moved(span: Span) -> Span:
        by = more if span[0] > start else -before
        return span[0] + by, span[1] + by

    at = start - before if start >= 0 else len(b'{"":') + len(name)  # else it comes first
    return replace(
        request,
        body=changed,
        spans={key: moved(span) for key, span in spans.items()} | {name: (at, at + len(raw))},
        prompts=None if request.prompts is None else [moved(span) for span in request.prompts],
    )
