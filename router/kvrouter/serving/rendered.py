"""Messages and responses with both legs, on engines that tell the token ids of such requests.

vLLM renders them at `PATH/render` if it is started with --enable-scale-out (entrypoints/scale_out/
render of vLLM 0.32). The prefill leg is a completion of these ids; the decode leg is the client's
own request, which has the same prompt and so the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson

from kvrouter.engines.engine import Role
from kvrouter.engines.families.splice import splice
from kvrouter.openai.endpoints import MESSAGES, RESPONSES
from kvrouter.openai.request import parse
from kvrouter.serving.legs.retries import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.engines.pool import EnginePool
    from kvrouter.openai.request import Request
    from kvrouter.prefix.tokenize import PromptTokens, TokenSource
    from kvrouter.serving.legs.orchestrator import Orchestrator
    from kvrouter.serving.request.context import RequestContext, ResponseSink

RENDERED: Final = {MESSAGES: f"{MESSAGES}/render", RESPONSES: f"{RESPONSES}/render"}
"""Where engines say what the prompt of a request to a path is."""
_OF_BOTH: Final = ("cache_salt", "priority")
"""Members that the prefill leg needs besides model and prompt."""


@dataclass(eq=False, slots=True, kw_only=True)
class RenderedLegs:
    """Takes messages and responses through both legs where engines can do that."""

    pool: EnginePool
    families: Families  # say which members are the router's own
    tokens: TokenSource  # asks engines for token ids
    orchestrator: Orchestrator
    sink: ResponseSink  # takes the answer
    _turn: int = field(default=0, init=False)

    async def run(self, context: RequestContext) -> bool:
        """Answer a request; False: it has to be answered by one engine, and nothing was done.

        Raises:
            ApiError, Refused: as `Orchestrator.run`; Refused by a decode engine alone.
        """
        path, model = context.exchange.path, context.model
        if path not in RENDERED or not self.pool.engines(Role.PREFILL, model):
            return False
        decode = self.pool.engines(Role.DECODE, model)
        if not decode or not all(_renders(engine, path) for engine in decode):
            return False
        tokens = await self._tokens(context, decode)
        if tokens is None:
            return False
        endpoint, context.endpoint = context.endpoint, None
        context.request = replace(context.request, path=path, stream=_streamed(context.request))
        context.prompt.tokens = tokens
        context.prompt.prefilled = _completion(context.request, model, tokens)
        try:
            await self.orchestrator.run(context, self.sink)
        except Refused:
            if context.route.attempts:
                raise
            context.endpoint = endpoint  # a decode engine refuses it in this endpoint's own words
            return False
        return True

    async def _tokens(
        self, context: RequestContext, decode: Sequence[Engine]
    ) -> PromptTokens | None:
        """Token ids of the prompt; None: no engine tells them, or they are not all of it."""
        request, family = context.request, self.families.of(decode[0])
        if not family.hashable(request) or family.parameters.refused(request) is not None:
            return None
        own = dict.fromkeys(family.parameters.own & request.spans.keys())
        body = splice(request.body, request.spans, own) if own else request.body
        self._turn += 1
        engine, since_s = decode[self._turn % len(decode)], monotonic()
        path = RENDERED[context.exchange.path]
        found = await self.tokens.rendered(engine, path, body)
        context.tokenised(since_s)
        return found


def _renders(engine: Engine, path: str) -> bool:
    listed = engine.identity.endpoints if engine.identity is not None else None
    return listed is not None and {path, RENDERED[path]} <= listed


def _streamed(request: Request) -> bool:
    return request.raw("stream") == b"true"


def _completion(request: Request, model: str, tokens: PromptTokens) -> Request:
    """A completion of the same prompt, in the same hash domain."""
    members = {"model": orjson.dumps(model), "prompt": tokens.json}
    members |= {name: raw for name in _OF_BOTH if (raw := request.raw(name)) is not None}
    body = b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), raw) for name, raw in members.items())
    return parse(body, "completion", 1)
