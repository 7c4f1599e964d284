"""Why an engine failed a request, in words that logs and metrics share."""

from __future__ import annotations

from enum import StrEnum


class Failure(StrEnum):
    """Why a leg failed, as far as the engine is to blame for it."""

    REFUSED = "refused"  # nothing listens there: the process is gone
    CONNECT = "connect"  # no connection within its deadline
    BROKEN = "broken"  # the connection broke before or within the answer
    TIMEOUT = "timeout"  # no answer, or no further byte of it, within its deadline
    STATUS = "status"  # a 5xx
    ANSWER = "answer"  # an answer that is not what the protocol says
    DEAD = "dead"  # the engine was found dead while the leg was in flight
