"""A collector that takes OTLP over HTTP; it is told as OpenTelemetry's SDK tells it.

A request is prepared once: what `requests` makes and looks up for each takes as long as to send it.
"""

from __future__ import annotations

import gzip
import logging
import zlib
from random import uniform
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final

from opentelemetry.util.re import parse_env_headers
from requests import ConnectionError as CannotConnect
from requests import Request, Session, Timeout
from urllib3 import Retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from requests import Response

    from kvrouter.tracing.config import OtlpSettings

TIMEOUT_S: Final = 10.0
"""How long a collector may take for a batch, with repetitions, where a timeout is no number."""
TRIES: Final = 6
_AGAIN: Final = frozenset({429, 502, 503, 504})
"""Answers after which OTLP has a client try again."""
_FAST: Final = 1
"""Level of compression; the SDK's, 9, takes five times as long and shrinks spans by 7 % more."""
_CONTENT: Final = "application/x-protobuf"

log = logging.getLogger(__name__)


class Collector:
    """Sends to one collector, over a connection that it keeps; for one thread.

    Args:
        endpoint: URL of its traces, as http://HOST:4318/v1/traces.
        agent: who sends, for the header `user-agent`.
        settings: how to reach it.
    """

    def __init__(self, endpoint: str, agent: str, settings: OtlpSettings) -> None:
        self._timeout_s = _timeout_s(settings.timeout)
        encoding, self._compress = _compression(settings.compression)
        headers = {"content-type": _CONTENT, "user-agent": agent}
        if encoding:
            headers["content-encoding"] = encoding
        headers |= parse_env_headers(settings.headers, liberal=True)
        self._session = Session()
        self._request = self._session.prepare_request(Request("POST", endpoint, headers))
        certificate, key = settings.client_certificate, settings.client_key
        self._way = self._session.merge_environment_settings(
            endpoint,
            proxies={},
            stream=False,
            verify=settings.certificate,
            cert=(certificate, key) if certificate and key else certificate,
        )

    def send(self, body: bytes) -> bool:
        """Whether it took `body`; blocks until it answers or its time is over.

        Raises:
            requests.RequestException: for what no repetition mends.
        """
        self._request.prepare_body(self._compress(body), None)
        deadline_s = monotonic() + self._timeout_s
        for tries in range(TRIES):
            answer = self._post(deadline_s - monotonic())
            if answer is not None and answer.status_code not in _AGAIN:
                return 200 <= answer.status_code < 300
            wait_s = _wait_s(answer, tries)
            if wait_s >= deadline_s - monotonic():
                return False
            sleep(wait_s)
        return False

    def _post(self, timeout_s: float) -> Response | None:
        """Its answer; None where there is none."""
        timeout_s = max(timeout_s, 0.001)
        try:
            return self._session.send(
                self._request, timeout=timeout_s, allow_redirects=False, **self._way
            )
        except (CannotConnect, Timeout):
            return None


def _wait_s(answer: Response | None, tries: int) -> float:
    """How long to wait before trying again: as the collector says, else 1, 2, 4 s and so on."""
    if answer is None:
        if tries == 0:
            return 0.0  # it may just have closed a connection that was kept
    elif (told_s := Retry().get_retry_after(answer.raw)) is not None:
        return told_s
    return uniform(0.8, 1.2) * 2.0**tries


def _timeout_s(told: str) -> float:
    try:
        return float(told)
    except ValueError:
        log.warning("traces: a timeout of %r is none; it is %g s", told, TIMEOUT_S)
        return TIMEOUT_S


def _compression(told: str) -> tuple[str | None, Callable[[bytes], bytes]]:
    """The name of the encoding, and what encodes."""
    name = told.strip().lower()
    if name == "gzip":
        return name, lambda body: gzip.compress(body, _FAST)
    if name == "deflate":
        return name, lambda body: zlib.compress(body, _FAST)
    if name != "none":
        log.warning("traces: %r is not gzip, deflate or none; they are not compressed", told)
    return None, lambda body: body
