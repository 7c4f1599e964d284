"""A request for several choices: legs for each prompt or sample, one answer for all.

The first share that fails ends the others; a client that leaves ends all of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from kvrouter.engines.engine import Role
from kvrouter.errors import ApiError
from kvrouter.openai import sse
from kvrouter.openai.late_refusal import refusal_events
from kvrouter.serving.choices.gathering import Gathering, ShareSink
from kvrouter.serving.choices.merge import BadShare, Share, ShareError, split
from kvrouter.serving.legs.failures import Refused
from kvrouter.serving.request.context import RequestContext, Route, Timing
from kvrouter.serving.request.headers import with_id
from kvrouter.serving.request.summary import usage_of

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.openai.request import Request
    from kvrouter.serving.legs.leg import EngineClient
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.streaming.resume import Resumption
    from kvrouter.telemetry.metrics import Metrics


@dataclass(eq=False, slots=True, kw_only=True)
class Fanout:
    """Serves requests for several choices, each share with its own legs."""

    pool: EnginePool
    families: Families  # say how many samples one prefill leg serves
    orchestrator: Orchestrator
    client: EngineClient  # reports engines that break off; knows their deadlines
    metrics: Metrics
    resumption: Resumption | None  # lets shares outlive their engine; None: none does

    def shares(self, request: Request, model: str) -> list[Share]:
        """The shares that serve `request`; a single one if one engine does all of it.

        Raises:
            ApiError: 400: a prompt is wrong.
        """
        if request.n > 1:
            for engine in self.pool.engines(Role.DECODE, model):
                family = self.families.of(engine)
                if family.needs_legs_per_sample(request):
                    return split(request, alone=True, varies_seeds=family.varies_seeds)
        return split(request, alone=False)

    async def serve(self, context: RequestContext, shares: list[Share]) -> None:
        """Take every share through its legs and answer the client. Nothing runs on afterwards.

        Raises:
            ApiError, Refused: a share's, if the client has seen nothing yet.
        """
        gathering = Gathering(context, self.client, self.metrics)
        parts = context.shares = [_part(context, share, i) for i, share in enumerate(shares)]
        sinks = [ShareSink(share, gathering) for share in shares]
        try:
            await _all(map(self._run, parts, sinks))
            gathering.finish()
        except (ApiError, Refused, BadShare, ShareError) as error:
            if not gathering.begun:
                raise _as_answer(error) from None
            context.outcome.end("broken")
            context.exchange.write(_as_events(error))
            context.exchange.end()
        finally:
            _sum_up(context, parts, shares, answered=gathering.begun)

    def _run(self, part: RequestContext, sink: ShareSink) -> Coroutine[None, None, None]:
        """Take a share through its legs."""
        resumption = self.resumption
        if resumption is not None and resumption.applies(part.request, part.model):
            return sink.resume(resumption, part)
        return self.orchestrator.run(part, sink)


def _part(context: RequestContext, share: Share, number: int) -> RequestContext:
    """The context of one share; engines see the request's id with the share's number."""
    request_id = f"{context.request_id}-{number}"
    fields = with_id(context.fields, request_id)
    timing = Timing(context.timing.started_s, context.timing.waited_s)
    part = RequestContext(context.exchange, request_id, fields, timing)
    part.request, part.model, part.trace = share.request, context.model, context.trace
    part.alias = context.alias
    return part


async def _all(runs: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all of them at once; the first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(run, name="share") for run in runs]
    task: asyncio.Task[None] | None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # they hold their errors, whose tracebacks hold this frame
        task = None


def _sum_up(
    context: RequestContext, parts: list[RequestContext], shares: list[Share], *, answered: bool
) -> None:
    """The shares have ended: release what they hold, and join their routes, times and outcomes."""
    for part in parts:
        part.resources.release()
        part.stream = None  # the log keeps the parts; a stream knows the contexts that hold it
    outcomes = [part.outcome for part in parts]
    context.route = _joined_route([part.route for part in parts])
    began = [part.timing for part in parts if part.timing.first_s]
    if began:
        first = min(began, key=attrgetter("first_s"))
        context.timing = replace(first, started_s=context.timing.started_s)
    outcome, generated = context.outcome, sum(each.generated for each in outcomes)
    used = [
        usage_of(part) for part, share in zip(parts, shares, strict=True) if share.counts_prompt
    ]
    prompt, cached = sum(each.prompt for each in used), sum(each.cached for each in used)
    if not answered:  # the client has got an error instead
        generated = prompt = cached = 0
    outcome.count(generated)
    outcome.count_prompt(prompt, cached)
    reason = outcomes[-1].reason if outcome.reason == "unknown" else outcome.reason
    outcome.end(reason, _joined(each.error for each in outcomes))


def _joined_route(routes: list[Route]) -> Route:
    """The route of a request whose shares took these."""
    plans = [route.plan for route in routes if route.plan is not None]
    landed = [route.landed_blocks for route in routes if route.landed_blocks is not None]
    return Route(
        plan=plans[0] if plans else None,
        prefill_engine=_joined(route.prefill_engine for route in routes),
        decode_engine=_joined(route.decode_engine for route in routes),
        attempts=sum(route.attempts for route in routes),
        hit_engine=sum(route.hit_engine for route in routes),
        hit_store=sum(route.hit_store for route in routes),
        landed_blocks=sum(landed) if landed else None,
        nothing_landed=_joined(route.nothing_landed for route in routes),
    )


def _joined(words: Iterable[str | None]) -> str | None:
    """The different ones of `words`, in their order."""
    return ",".join(dict.fromkeys(word for word in words if word)) or None


def _as_answer(error: Exception) -> Exception:
    """What answers the request if nothing of it was answered yet."""
    return error if isinstance(error, ApiError | Refused) else _unusable(error)


def _as_events(error: Exception) -> bytes:
    """The last events of a stream that cannot go on."""
    if isinstance(error, ApiError):
        return sse.error_events(error)
    if isinstance(error, Refused):
        return refusal_events(error.words.status, error.words.body or b"")
    payload = error.payload if isinstance(error, ShareError) else b""
    return sse.last_events(payload) if payload else sse.error_events(_unusable(error))


def _unusable(error: Exception) -> ApiError:
    return ApiError(502, f"An engine's answer cannot be served: {error}.")
