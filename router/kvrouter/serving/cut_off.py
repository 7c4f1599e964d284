"""What clients are told whose requests the router cuts off because it stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.errors import ApiError
from kvrouter.openai.sse import error_events
from kvrouter.serving.streaming.relay import Relay

if TYPE_CHECKING:
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.serving.request.context import Tap
    from kvrouter.telemetry.metrics import Metrics

CUT_OFF: Final = ApiError(503, "The router is stopping; try again.", retry_after_s=1)


def cut_off(exchange: Exchange, metrics: Metrics, fields: bytes, tap: Tap | None = None) -> None:
    """End the answer: a stream that has begun with an error event, any other with a 503.

    Args:
        exchange: its client is still there, and its answer has not ended.
        metrics: counts it.
        fields: header lines of the answer, where it has not begun.
        tap: what the stream goes through, where it can stop in the middle of an event.
    """
    metrics.cut_off["stream" if exchange.started else "none"] += 1
    if not exchange.started:
        exchange.respond(CUT_OFF.status, CUT_OFF.body(), headers=CUT_OFF.headers(), fields=fields)
    elif isinstance(tap, Relay):
        tap.fail(CUT_OFF)
    else:
        exchange.write(error_events(CUT_OFF))
        exchange.end()
