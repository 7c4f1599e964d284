"""Failures that a simulated engine makes on purpose. Pure: it says which, the server answers so.

Kinds and rate are llm-d-inference-sim's (docs/configuration.md, "Failure injection").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

__all__ = ["FAILURES", "FailureInjection", "InjectedFailure"]


@dataclass(frozen=True)
class InjectedFailure:
    """One kind of failure, as the client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None


FAILURES: Mapping[str, InjectedFailure] = MappingProxyType(
    {
        "rate_limit": InjectedFailure(429, "RateLimitError", "Rate limit reached (injected)."),
        "invalid_api_key": InjectedFailure(
            401, "AuthenticationError", "Incorrect API key (injected)."
        ),
        "context_length": InjectedFailure(
            400,
            "BadRequestError",
            "This model's maximum context length is exceeded (injected).",
            "messages",
        ),
        "server_error": InjectedFailure(
            500, "InternalServerError", "The server had an error (injected)."
        ),
        "invalid_request": InjectedFailure(400, "BadRequestError", "Invalid request (injected)."),
        "model_not_found": InjectedFailure(
            404, "NotFoundError", "The model does not exist (injected).", "model"
        ),
    }
)


class FailureInjection:
    """Draws a failure for a share of the requests."""

    def __init__(self, rate_percent: int, kinds: Sequence[str], random: Random) -> None:
        self._rate = rate_percent
        self._kinds = tuple(kinds) or tuple(FAILURES)
        self._random = random

    def draw(self) -> InjectedFailure | None:
        """The failure of the next request; None where it shall go well."""
        if self._rate == 0 or self._random.random() * 100 >= self._rate:
            return None
        return FAILURES[self._random.choice(self._kinds)]
