"""Requests to the API server of Kubernetes, each with a deadline and a bounded answer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from kvrouter.membership.kubernetes.mirror import GONE, Expired, read_status
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterator, Mapping

MAX_PAGE_BYTES: Final = 32 << 20
_SHOWN: Final = 300
_REMEDIES: Final = {
    401: "its credentials are not accepted",
    403: "let it get, list and watch them (docs/discovery.md#kubernetes)",
}


class ApiFailed(Exception):
    """The API server cannot be asked, or does not answer as it should; a sentence."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is, and what to show it.

    Attributes:
        url: its base, without a trailing slash.
        namespace: where the URL of the source names none.
        headers: with the credentials.
        tls: whom to trust, and the client's certificate.
        tls_name: that its certificate has; None: the host of `url`.
        proxy: URL of an HTTP proxy; None: none.
    """

    url: str
    namespace: str = "default"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | bool = True
    tls_name: str | None = None
    proxy: str | None = None


class Session:
    """Requests to one server over connections of its own. Enter it.

    Args:
        server: whom to ask.
        answer_s: deadline of a page, and of the beginning of a watch.
    """

    def __init__(self, server: ApiServer, answer_s: float) -> None:
        self.server = server
        self._answer_s = answer_s
        self._http = aiohttp.ClientSession(headers=server.headers, trust_env=False)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def page(self, path: str, query: Mapping[str, str]) -> bytes:
        """The body of a 200.

        Raises:
            Expired: it is a 410.
            ApiFailed: there is no other answer within the deadline, or a longer one.
        """
        async with self._answer(path, query) as answer, asyncio.timeout(self._answer_s):
            return await _read(answer, MAX_PAGE_BYTES)

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
        options: dict[str, Any] = {"proxy": self.server.proxy, "allow_redirects": False}
        if self.server.url.startswith("https:"):
            options |= {"ssl": self.server.tls, "server_hostname": self.server.tls_name}
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await self._http.get(
                    self.server.url + path,
                    params=query,
                    timeout=aiohttp.ClientTimeout(total=None),
                    **options,
                )
                if answer.status != 200:
                    raise _refusal(answer.status, path, await _read(answer, MAX_PAGE_BYTES))
            async with answer:
                yield answer
        except TimeoutError:
            raise ApiFailed(f"{self.server.url} does not answer in time") from None
        except aiohttp.ClientConnectorError as error:
            reason = reason_of(error.os_error)
            raise ApiFailed(f"{self.server.url} cannot be reached: {reason}") from None
        except aiohttp.ClientPayloadError:
            raise ApiFailed(f"{self.server.url}: its answer broke off") from None
        except (aiohttp.ClientError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ApiFailed(f"{self.server.url}: {reason[:_SHOWN]}") from None


async def _read(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        if len(content) > most_bytes:
            raise ApiFailed(f"{answer.url.path} answers more than {most_bytes} bytes")
    return bytes(content)


def _refusal(status: int, path: str, body: bytes) -> Exception:
    if status == GONE:
        return Expired()
    said = read_status(body)[:_SHOWN]
    parts: Iterator[str] = filter(None, (f"{path} answers {status}", said, _REMEDIES.get(status)))
    return ApiFailed(": ".join(parts))
