"""Messages and responses with both legs, on engines that tell the token ids of such requests.

vLLM renders them at `PATH/render` if it is started with --enable-scale-out (entrypoints/scale_out/
render of vLLM 0.32). The prefill leg is a completion of these ids; the decode leg is the client's
own request, which has the same prompt and so the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.base import LegOrder
from kvrouter.engines.families.splice import splice
from kvrouter.openai.endpoints import MESSAGES, RESPONSES
from kvrouter.openai.request import Request, parse
from kvrouter.routing.plan import Why
from kvrouter.serving.legs.failures import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.prefix.tokenize import PromptTokens, TokenSource
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.request.context import RequestContext, ResponseSink

RENDERED: Final = {MESSAGES: f"{MESSAGES}/render", RESPONSES: f"{RESPONSES}/render"}
"""Where engines say what the prompt of a request to a path is."""
_CLIENTS_TOOLS: Final = (None, "custom", "function")  # types of tools that the client calls


@dataclass(eq=False, slots=True, kw_only=True)
class RenderedLegs:
    """Takes messages and responses through both legs where engines can do that."""

    pool: EnginePool
    families: Families  # say which members are the router's own
    tokens: TokenSource  # asks engines for token ids
    orchestrator: Orchestrator
    sink: ResponseSink  # takes the answer

    async def run(self, context: RequestContext) -> Why | None:
        """Answer a request; else say why one engine has to, with nothing done.

        Raises:
            ApiError, Refused: as `Orchestrator.run`; Refused by a decode engine alone.
        """
        path, model = context.exchange.path, context.model
        if path not in RENDERED or not self.pool.engines(Role.PREFILL, model):
            return Why.NO_PREFILL_ENGINE
        decode = self.pool.engines(Role.DECODE, model)
        if not decode or not all(self._renders(engine, path) for engine in decode):
            return Why.NOT_RENDERED
        if not _takes_legs(context.request):
            return Why.NOT_SPLITTABLE
        tokens = await self._tokens(context, decode)
        if tokens is None:
            return Why.NOT_RENDERED
        endpoint, context.endpoint = context.endpoint, None
        context.request = replace(context.request, path=path)
        context.prompt.tokens = tokens
        context.prompt.prefilled = _completion(context.request, model, tokens)
        try:
            await self.orchestrator.run(context, self.sink)
        except Refused as refused:
            if refused.leg is not Role.PREFILL or context.answering:
                raise
            context.endpoint = endpoint  # a decode engine refuses it in this endpoint's own words
            return Why.REFUSED
        return None

    def _renders(self, engine: Engine, path: str) -> bool:
        """Whether both legs of an engine get the same token ids.

        vLLM's harmony models render responses again on the decode leg, with the date of that time.
        What is found by its hash may then be missing, what is handed over would be wrong.
        """
        listed = engine.identity.endpoints if engine.identity is not None else None
        if listed is None or not {path, RENDERED[path]} <= listed:
            return False
        return path != RESPONSES or self.families.of(engine).order is LegOrder.STORE

    async def _tokens(
        self, context: RequestContext, decode: Sequence[Engine]
    ) -> PromptTokens | None:
        """Token ids of the prompt; None: no engine tells them, or they are not all of it."""
        request, family = context.request, self.families.of(decode[0])
        if not family.hashable(request) or family.parameters.refused(request) is not None:
            return None
        own = dict.fromkeys(family.parameters.own & request.spans.keys())
        body = splice(request.body, request.spans, own) if own else request.body
        since_s, path = monotonic(), RENDERED[context.exchange.path]
        found = await self.tokens.rendered(decode, path, body)
        context.tokenised(since_s)
        return found


def _takes_legs(request: Request) -> bool:
    """Whether both legs have the same prompt, and nothing but the answer comes of the decode leg.

    vLLM's /render does not probe what "disabled" thinking is for a model (anthropic/serving.py
    does). Tools that the engine calls itself make several prompts of a request, and other things.
    """
    if request.raw("stream") not in (None, b"true", b"false"):  # the engine refuses it
        return False
    try:
        thinking = orjson.loads(request.raw("thinking") or b"null")
        tools = orjson.loads(request.raw("tools") or b"[]")
    except ValueError:
        return False
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return False
    return isinstance(tools, list) and all(
        isinstance(tool, dict) and tool.get("type") in _CLIENTS_TOOLS for tool in tools
    )


def _completion(request: Request, model: str, tokens: PromptTokens) -> Request:
    """A completion of the same prompt, in the same hash domain."""
    members = {"model": orjson.dumps(model), "prompt": tokens.json}
    given = ("cache_salt", "priority") if request.path == RESPONSES else ("cache_salt",)
    members |= {name: raw for name in given if (raw := request.raw(name)) is not None}
    body = b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), raw) for name, raw in members.items())
    return parse(body, "completion", 1)
