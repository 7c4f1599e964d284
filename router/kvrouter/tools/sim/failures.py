"""Failures that a simulated engine makes on purpose. Pure: it says which; the server answers them.

Kinds and rate are those of llm-d-inference-sim (docs/configuration.md, "Failure injection").
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from types import MappingProxyType

from kvrouter.errors import ApiError

FAILURES: Mapping[str, Callable[[], ApiError]] = MappingProxyType(
    {
        "rate_limit": partial(ApiError, 429, "Rate limit reached (injected)."),
        "invalid_api_key": partial(ApiError, 401, "Incorrect API key (injected)."),
        "context_length": partial(
            ApiError,
            400,
            "This model's maximum context length is exceeded (injected).",
            param="messages",
        ),
        "server_error": partial(ApiError, 500, "The server had an error (injected)."),
        "invalid_request": partial(ApiError, 400, "Invalid request (injected)."),
        "model_not_found": partial(
            ApiError, 404, "The model does not exist (injected).", param="model"
        ),
    }
)


class FailureInjection:
    """Draws a failure for a share of the requests."""

    def __init__(self, rate_percent: int, kinds: Sequence[str], random: Random) -> None:
        self._rate = rate_percent
        self._kinds = tuple(kinds) or tuple(FAILURES)
        self._random = random

    def draw(self) -> ApiError | None:
        """The failure of the next request; None if it shall succeed."""
        if self._rate == 0 or self._random.random() * 100 >= self._rate:
            return None
        return FAILURES[self._random.choice(self._kinds)]()
