"""Requests to the API server of Kubernetes, each with a deadline and a bounded answer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from kvrouter.membership.bounded_answer import read_bounded
from kvrouter.membership.kubernetes.mirror import GONE, Expired, read_status
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

MAX_PAGE_BYTES: Final = 12 << 20
_SHOWN: Final = 300
_UNAUTHORIZED: Final = 401
_REMEDIES: Final = {
    _UNAUTHORIZED: "its credentials are not accepted",
    403: "let it list and watch them (docs/discovery.md#kubernetes)",
}


class ApiFailed(Exception):
    """The API server cannot be asked, or does not answer as it should; a sentence."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is, and what to show it."""

    url: str  # its base, without a trailing slash
    namespace: str = "default"  # where the URL of the source names none
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # with the credentials
    # Whom to trust, and the client's certificate; None: the server is asked without TLS.
    tls: ssl.SSLContext | None = None
    tls_name: str | None = None  # that its certificate has; None: the host of `url`
    # URL of an HTTP proxy, which may hold a password; None: none.
    proxy: str | None = field(default=None, repr=False)
    # Called when the server does not accept the credentials.
    refused: Callable[[], None] = lambda: None


@dataclass(eq=False)
class Session:
    """Requests to one server over connections of its own. Enter it."""

    server: ApiServer  # whom to ask
    answer_s: float  # deadline of a page, and of the beginning of a watch

    def __post_init__(self) -> None:
        self._http = aiohttp.ClientSession(headers=self.server.headers, trust_env=False)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def page(self, path: str, query: Mapping[str, str]) -> bytes:
        """The body of a 200.

        Expired: it is a 410. ApiFailed: there is no other answer within the deadline, or a longer
        one.
        """
        async with self._answer(path, query) as answer, asyncio.timeout(self.answer_s):
            return await read_bounded(answer, MAX_PAGE_BYTES, ApiFailed)

    @asynccontextmanager
    async def watch(
        self, path: str, query: Mapping[str, str], longest_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of a watch as they come. Raises as `page`, and after `longest_s` seconds."""
        async with self._answer(path, query) as answer, asyncio.timeout(longest_s):
            yield answer.content.iter_any()

    @asynccontextmanager
    async def _answer(
        self, path: str, query: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of a 200, within the deadline; failures of what is done with it are told too."""
        with _told(self.server):
            async with asyncio.timeout(self.answer_s):
                answer = await self._get(path, query)
                if answer.status != 200:
                    body = await read_bounded(answer, MAX_PAGE_BYTES, ApiFailed)
                    raise self._refusal(answer.status, path, body)
            async with answer:
                yield answer

    async def _get(self, path: str, query: Mapping[str, str]) -> aiohttp.ClientResponse:
        options: dict[str, Any] = {"proxy": self.server.proxy, "allow_redirects": False}
        if self.server.tls is not None:
            options |= {"ssl": self.server.tls, "server_hostname": self.server.tls_name}
        try:
            return await self._http.get(
                self.server.url + path,
                params=query,
                timeout=aiohttp.ClientTimeout(total=None),
                **options,
            )
        except ValueError as error:  # its text may be the URL of the proxy
            if isinstance(error, OSError):  # a certificate that is not trusted
                raise
            raise ApiFailed(f"{self.server.url}: its URL, or that of its proxy, is none") from None

    def _refusal(self, status: int, path: str, body: bytes) -> Exception:
        if status == GONE:
            return Expired()
        if status == _UNAUTHORIZED:
            self.server.refused()
        said = read_status(body)[:_SHOWN]
        parts: Iterator[str] = filter(
            None, (f"{path} answers {status}", said, _REMEDIES.get(status))
        )
        return ApiFailed(": ".join(parts))


@contextmanager
def _told(server: ApiServer) -> Iterator[None]:
    """Tell failures of requests, without the URL of the proxy: it may hold a password."""
    url = server.url
    try:
        yield
    except TimeoutError:
        raise ApiFailed(f"{url} does not answer in time") from None
    except aiohttp.ClientConnectorError as error:
        way = " through its proxy" if server.proxy else ""
        raise ApiFailed(f"{url} cannot be reached{way}: {reason_of(error.os_error)}") from None
    except aiohttp.ClientHttpProxyError as error:
        raise ApiFailed(f"{url}: its proxy answers {error.status}") from None
    except aiohttp.ClientPayloadError:
        raise ApiFailed(f"{url}: its answer broke off") from None
    except aiohttp.ClientResponseError:
        raise ApiFailed(f"{url}: what answers speaks no HTTP") from None
    except aiohttp.ClientError as error:
        reason = str(error) or type(error).__name__
        raise ApiFailed(f"{url}: {reason[:_SHOWN]}") from None
