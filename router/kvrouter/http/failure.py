"""Why an engine failed a request, in words that logs and metrics share."""

from __future__ import annotations

from enum import StrEnum


class Failure(StrEnum):
    """Why a leg failed; `kvrouter.serving.legs.failures` says what follows from each."""

    REFUSED = "refused"  # nothing listens there: the process is gone
    CONNECT = "connect"  # no connection within its deadline
    BROKEN = "broken"  # the connection broke before or within the answer
    DEAD = "dead"  # declared dead while a leg was in flight
    TIMEOUT = "timeout"  # no answer, or no further byte of it, within its deadline
    FULL = "full"  # a 429, or a 503 of an engine: it has no room
    ERROR = "error"  # a 500: of the engine, or of any engine that gets this request
    STATUS = "status"  # another 5xx, or a refusal of the router's own key
    ANSWER = "answer"  # an answer that is not what the protocol says
    ABORTED = "aborted"  # a 200 that says that it did not work
    REQUEST = "request"  # a 4xx: the request is to blame
    TOO_LARGE = "too_large"  # an answer beyond what the router keeps
    LOCAL = "local"  # the router has no descriptor, port or memory left
