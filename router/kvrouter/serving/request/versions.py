"""Puts a model in the place of an alias, the same one for all requests of a session."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from kvrouter.errors import ApiError
from kvrouter.openai.rename import renamed
from kvrouter.prefix.session import session_of
from kvrouter.routing.versions import version_of

if TYPE_CHECKING:
    from kvrouter.admission.waiting import EngineWait
    from kvrouter.engines.models import ModelNames
    from kvrouter.engines.pool import EnginePool
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics


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
