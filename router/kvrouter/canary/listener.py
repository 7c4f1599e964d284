"""Listens to the answer of a sampled request as it passes, and keeps its tokens.

The engine names them since the router asked it to; a client that did not ask sees none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.openai.response import tidy_events
from kvrouter.serving.streaming.relay import Relay
from kvrouter.serving.streaming.sinks import ClientSink

if TYPE_CHECKING:
    from kvrouter.http.client.pool import EngineResponse
    from kvrouter.openai.token_events import Spoken
    from kvrouter.serving.legs.leg import Legs
    from kvrouter.serving.request.context import RequestContext
    from kvrouter.telemetry.metrics import Metrics


class Listening(ClientSink):
    """The outlet of a sampled request: as `ClientSink`, and `spoken` is told what passes."""

    def __init__(self, legs: Legs, metrics: Metrics, spoken: Spoken) -> None:
        super().__init__(legs, metrics)
        self._spoken = spoken

    def whole(self, context: RequestContext, body: bytes) -> None:
        """Answer, without the tokens' names where the client did not ask for them."""
        super().whole(context, self._spoken.whole(body))

    def relay(self, context: RequestContext, answer: EngineResponse) -> Relay:
        """As `ClientSink.relay`, after every event was heard."""
        spoken, cached = self._spoken, context.route.cached_tokens

        def tidy(events: bytes) -> bytes:
            return tidy_events(spoken.take(events), cached)

        return Relay(context.exchange, answer, self._metrics.gaps.buckets, tidy, every=True)
