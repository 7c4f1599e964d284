"""How legs fail, and how often another engine is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvrouter.errors import ApiError
from kvrouter.http.failure import Failure

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine, Role

NOT_TAKEN: Final = frozenset({Failure.REFUSED, Failure.CONNECT})
"""Failures of an engine that has not seen the request."""
AGAIN: Final = NOT_TAKEN | {Failure.DEAD}
"""Failures after which another engine does a prefill leg: this one is no longer there."""


@dataclass(slots=True)
class Retries:
    """How often engines are asked."""

    max_attempts: int  # engines asked at most for one leg of one request; may change


class LegFailed(Exception):
    """An engine did not do its leg; another one may."""

    def __init__(self, engine: Engine, failure: Failure, message: str) -> None:
        super().__init__(f"{engine.address}: {message}")
        self.engine = engine
        self.failure = failure


class EngineFull(LegFailed):
    """An engine has no room (429): it has done nothing, and is not ill."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, Failure.STATUS, "it is full")


class Refused(Exception):
    """An engine refused the request itself (4xx): its answer is the client's answer."""

    def __init__(self, status: int, body: bytes, content_type: str, leg: Role) -> None:
        super().__init__(f"refused with {status}")
        self.leg = leg
        self.status = status
        self.body = body
        self.content_type = content_type


def decode_error(failed: LegFailed) -> ApiError:
    """What the client gets if no engine did its part."""
    if failed.failure is Failure.TIMEOUT:
        return ApiError(504, "The engine did not answer in time.")
    if failed.failure is Failure.ANSWER:
        return ApiError(502, "The engine's answer cannot be served.")
    return ApiError(503, "No decode engine could answer.", retry_after_s=1)
