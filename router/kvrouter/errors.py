"""Errors as clients see them: OpenAI's error object, or Anthropic's."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import orjson

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "BadRequestError",
        401: "AuthenticationError",
        403: "PermissionDeniedError",
        404: "NotFoundError",
        405: "MethodNotAllowedError",
        408: "RequestTimeoutError",
        413: "PayloadTooLargeError",
        414: "URITooLongError",
        415: "UnsupportedMediaTypeError",
        429: "RateLimitError",
        431: "RequestHeaderFieldsTooLargeError",
        502: "BadGatewayError",
        503: "ServiceUnavailableError",
        504: "GatewayTimeoutError",
    }
)
"""OpenAI's `type` by status, as vLLM spells it."""
_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)
"""Those that Anthropic documents (docs.claude.com/en/api/errors); else by class."""
_MESSAGES: Final = "/v1/messages"
_RESPONSES: Final = "/v1/responses"


def speaks_anthropic(path: str) -> bool:
    """Whether clients of an endpoint read Anthropic's errors."""
    return path.startswith(_MESSAGES)


def names_events(path: str) -> bool:
    """Whether each event of an endpoint's streams says its type, and none marks the end."""
    return path == _RESPONSES or speaks_anthropic(path)


class ApiError(Exception):
    """A refusal or failure that the client gets as OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        retry_after_s: int | None = None,
        more_headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status  # HTTP status, 4xx or 5xx
        self.message = message  # one sentence; it never holds a secret or an engine's stack trace
        # OpenAI's `type`; derived from the status by default.
        self.kind = kind or _TYPES.get(status, "InternalServerError")
        self.param = param  # the wrong parameter of the body, if it is one
        # OpenAI's `code`; the status by default, as vLLM has it.
        self.code: str | int = status if code is None else code
        # Seconds for the `Retry-After` header, if trying again can help.
        self.retry_after_s = retry_after_s
        self.more_headers = more_headers  # others that go with it

    def body(self, path: str = "") -> bytes:
        """The JSON of the whole answer, as clients of that endpoint read it."""
        if speaks_anthropic(path):
            usual = "invalid_request_error" if self.status < 500 else "api_error"
            kind = _ANTHROPIC_TYPES.get(self.status, usual)
            told = {"type": kind, "message": self.message}
            return orjson.dumps({"type": "error", "error": told})
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def event(self, path: str = "", number: int = 0) -> bytes:
        """The same for a stream; in OpenAI's responses it is a numbered event.

        These have its members flat; OpenAI's SDKs raise it if it is there as `error`, too.
        """
        body = self.body(path)
        if path != _RESPONSES:
            return body
        told = {"code": str(self.code), "message": self.message, "param": self.param}
        return orjson.dumps(
            {"type": "error", **told, "sequence_number": number, **orjson.loads(body)}
        )

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers that go with it, as `Retry-After` where it has one, or the challenge of a 401."""
        if self.status == 401:
            return (("www-authenticate", "Bearer"),)
        if self.retry_after_s is None:
            return self.more_headers
        return (*self.more_headers, ("retry-after", str(self.retry_after_s)))


FAILED: Final = ApiError(500, "The router failed to serve this request; its log says why.")
"""A defect of the router: its log has the traceback."""


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the body is wrong; `param` names the parameter."""
    return ApiError(400, message, param=param)


def model_not_found(model: str) -> ApiError:
    """404: no engine serves `model`."""
    shown = model if len(model) <= 200 else model[:200] + "..."
    return ApiError(
        404, f"The model `{shown}` does not exist.", param="model", code="model_not_found"
    )


def endpoint_not_served(path: str, offered: Sequence[str], model: str | None = None) -> ApiError:
    """404: engines of `model` (None: of any) do not have `path`, but what is offered."""
    engine = "engine" if model is None else f"engine of the model `{model}`"
    message = f"No {engine} serves {path[:200]}."
    if offered:
        message += f" Served: {', '.join(offered)}."
    return ApiError(404, message, code="endpoint_not_served")
