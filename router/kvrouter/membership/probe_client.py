"""The HTTP client of probes: plain requests to engines, each with a deadline."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from errno import ECONNREFUSED
from typing import TYPE_CHECKING, Final, Self

import aiohttp

from kvrouter.credentials.engine_keys import REFUSALS, WorkerKeys
from kvrouter.credentials.tls import Trust
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.membership.bounded_answer import read_bounded
from kvrouter_store.system_errors import is_ours, reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.engine import Engine

MAX_ANSWER_BYTES: Final = 4 << 20
GENERATION_S: Final = 60.0
"""For a request of one token: it waits its turn among the engine's other requests."""
_SHOWN_BYTES: Final = 200
_CUT_OFF: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
_CERTIFICATE: Final = " (if it asks for a certificate: --engine-cert-file has one that it trusts)"
"""In TLS 1.3 a server refuses a certificate, or none, after the handshake."""


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """An engine's 200; `headers` by their names in lower case."""

    body: bytes
    headers: Mapping[str, str]


async def connection_problem(host: str, port: int, timeout_s: float) -> str:
    """Make a connection and close it; why nobody takes it, or ""."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
    except OSError as error:  # also TimeoutError
        return reason_of(error) or "no answer in time"
    return ""


@dataclass(eq=False)
class ProbeClient:
    """Sends requests to engines. Its owner calls `close`, or uses it in an `async with`."""

    worker_keys: WorkerKeys = field(default_factory=WorkerKeys)  # API keys of engines
    trust: Trust = field(default_factory=Trust)  # authorities of engines with HTTPS
    timeout_s: float = 5.0  # for one GET by `body`; may change
    _session: aiohttp.ClientSession | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the session. Idempotent."""
        if self._session is not None:
            await self._session.close()

    async def body(self, engine: Engine, path: str, sent: bytes | None) -> bytes:
        """The body of the engine's 200; see `ask`."""
        deadline_s = self.timeout_s if sent is None else GENERATION_S
        return (await self.ask(engine, path, sent, deadline_s)).body

    async def ask(
        self, engine: Engine, path: str, body: bytes | None, deadline_s: float
    ) -> ProbeResponse:
        """The engine's 200 to a GET of a path or URL, or to a POST; ProbeFailed: there is none."""
        if self._session is None:
            # Each probe connects: it shows whether the engine accepts connections.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        sent = {} if body is None else {"content-type": "application/json"}
        if "://" not in path:  # a bootstrap server is another server, which gets no key
            sent |= self.worker_keys.headers(engine.server.address)
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                path if "://" in path else engine.url + path,
                data=body,
                headers=sent,
                allow_redirects=False,
                ssl=self.trust.context if engine.server.tls else True,
                timeout=aiohttp.ClientTimeout(total=deadline_s),
            ) as answer:
                content = await read_bounded(answer, MAX_ANSWER_BYTES, ProbeFailed)
                headers = {name.lower(): value for name, value in answer.headers.items()}
                if answer.status != 200:
                    key = " (its key is --worker-api-key)" if answer.status in REFUSALS else ""
                    said = f"{path} answers {answer.status}: {_short(content)}{key}"
                    raise ProbeFailed(said, answer.status)
                return ProbeResponse(content, headers)
        except TimeoutError:
            raise ProbeFailed(
                f"{path} does not answer within {deadline_s:g} s", silent=True
            ) from None
        except aiohttp.ClientConnectorError as error:
            reason, refused = reason_of(error.os_error), error.errno == ECONNREFUSED
            ours = is_ours(error.os_error)
            raise ProbeFailed(
                f"{path} cannot be reached: {reason}", silent=not (refused or ours), ours=ours
            ) from None
        except (aiohttp.ClientError, ValueError) as error:
            cut = engine.server.tls and isinstance(error, _CUT_OFF)
            said = f"{error or type(error).__name__}{_CERTIFICATE if cut else ''}"
            raise ProbeFailed(f"{path}: {said}", silent=True) from None


def _short(content: bytes) -> str:
    return " ".join(content[:_SHOWN_BYTES].decode("utf-8", "replace").split())
