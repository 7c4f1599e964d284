"""Turns the bytes of one client into requests. llhttp (httptools) parses; the rest is checked here.

Knows no sockets and no time, and answers nothing.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn, Protocol

import httptools

from kvrouter._native import HeaderFields
from kvrouter.errors import ApiError
from kvrouter.http.server.limits import Limits

_VERSIONS = ("1.1", "1.0")
_HOST = re.compile(r"[\w.~!$&'()*+,;=:%\[\]-]*", re.ASCII)  # RFC 3986 3.2.2, and a port


class Phase(Enum):
    """What the next bytes belong to."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    STOPPED = "stopped"


class Requests(Protocol):
    """Takes the requests that a `Reader` finds, in order."""

    def begin(
        self,
        *,
        method: str,
        path: str,
        query: str,
        headers: dict[str, str],
        keep_alive: bool,
        http_1_1: bool,
    ) -> None:
        """A head is whole."""

    def complete(self, body: bytes) -> bool:
        """The body of the last head is whole. False: nothing more is read."""


class _StopError(Exception):
    """Raised through llhttp to stop it."""


@dataclass(eq=False, repr=False, slots=True)
class Reader:
    """Finds the requests in what one client sends."""

    limits: Limits  # what is accepted
    requests: Requests  # takes heads and bodies, from within `feed`
    phase: Phase = Phase.IDLE  # what the next bytes belong to; STOPPED: they are dropped
    body_bytes: int = 0  # what has come of the present body
    on_header: Callable[[bytes, bytes], None] = field(init=False)
    _fields: HeaderFields = field(init=False)
    _parser: httptools.HttpRequestParser = field(init=False)
    _url: bytes = b""
    _host: str = ""  # the last valid one
    _body: bytes | bytearray = b""
    _progress: bool = False  # whether the last bytes held a part of a body or a request's end
    _waste_bytes: int = 0  # of a head, or of trailers and chunk extensions, since the last part
    _refusal: ApiError | None = None
    _unread: bytes = b""  # framing of a body that llhttp leaves to another protocol
    _replaying: bool = False

    def __post_init__(self) -> None:
        self._fields = HeaderFields(self.limits.headers, self.limits.head_bytes)
        self.on_header = self._fields.add
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> ApiError | None:
        """Parse more bytes. A refusal: they break a rule or a limit; nothing more is read."""
        if self.phase is Phase.STOPPED:
            return None
        self._progress = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._read_on(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            return self._broken(error.__context__)
        if self.phase is not Phase.IDLE and not self._progress:
            # Only a head, or trailers and the like behind a body: neither may go on for ever.
            self._waste_bytes += len(data)
            if self._waste_bytes > self.limits.head_bytes:
                self.stop()
                return ApiError(431, "the request's head or trailers are too large")
        return None

    def stop(self) -> None:
        """Drop what has come of a request, and all that comes."""
        self.phase = Phase.STOPPED
        self._body = b""
        self.body_bytes = 0

    def close(self) -> None:
        """The connection is gone. Breaks the cycle with the parser, which holds methods of this."""
        self.stop()
        del self._parser, self.requests

    # -- callbacks of llhttp; `on_header` is native

    def on_message_begin(self) -> None:
        """A request line starts."""
        if self._replaying:
            return
        if self.phase is Phase.STOPPED:
            raise _StopError
        self.phase = Phase.HEAD
        self._url = b""
        self._fields.take()  # trailers of the request before
        self._waste_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        if self._replaying:
            return
        self._url = self._url + url if self._url else url
        if len(self._url) > self.limits.url_bytes:
            self._refuse(414, f"the URL is longer than {self.limits.url_bytes} bytes")

    def on_headers_complete(self) -> None:
        """The head is whole: check it before its body comes."""
        headers = self._fields.take()
        if self._replaying:
            return
        if headers is None:
            self._refuse(431, "the request's head is too large")
        parser = self._parser
        version = parser.get_http_version()
        self._check_head(headers, version)
        self.phase = Phase.BODY
        self._waste_bytes = 0
        self._body = b""
        self.body_bytes = 0
        path, _, query = _target(self._url).partition("?")
        if path.endswith("/"):
            path = path[:-1] or "/"
        method = parser.get_method().decode("ascii")
        if parser.should_upgrade() and method != "CONNECT":
            self._unread = _framing(headers)
        self.requests.begin(
            method=method,
            path=path,
            query=query,
            headers=headers,
            keep_alive=parser.should_keep_alive() and method != "CONNECT",
            http_1_1=version == "1.1",
        )
        self._check_framing(headers, version)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._progress = True
        self._waste_bytes = 0
        self.body_bytes += len(body)
        if self.body_bytes > self.limits.body_bytes:
            self._refuse_body()
        if not self._body:
            self._body = body
        elif isinstance(self._body, bytearray):
            self._body += body
        else:
            self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        """The request is whole, unless it asked for an upgrade and its body is still to be read."""
        if self._unread and not self._replaying:
            return
        body, self._body = self._body, b""
        self.body_bytes = 0
        self._progress = True
        self.phase = Phase.IDLE
        if not self.requests.complete(bytes(body)):
            self.stop()

    # -- inside

    def _check_head(self, headers: dict[str, str], version: str) -> None:
        if version not in _VERSIONS:
            self._refuse(400, "the version of HTTP is neither 1.1 nor 1.0")
        host = headers.get("host")
        if host is None:
            if version == "1.1":
                self._refuse(400, "a request of HTTP/1.1 needs a Host header (RFC 9112 3.2)")
        elif host != self._host:
            if _HOST.fullmatch(host) is None:  # two are joined with ", "
                self._refuse(400, "a request needs one valid Host header (RFC 9112 3.2)")
            self._host = host

    def _check_framing(self, headers: dict[str, str], version: str) -> None:
        coding = headers.get("transfer-encoding")
        if coding is not None:
            if version == "1.0":
                self._refuse(400, "HTTP/1.0 has no Transfer-Encoding (RFC 9112 6.1)")
            if coding.lower() != "chunked":
                self._refuse(400, "the only transfer coding known is chunked (RFC 9112 6.1)")
        elif int(headers.get("content-length", "0")) > self.limits.body_bytes:
            self._refuse_body()

    def _refuse_body(self) -> NoReturn:
        self._refuse(413, f"the body is larger than {self.limits.body_bytes} bytes")

    def _refuse(self, status: int, message: str) -> NoReturn:
        self._refusal = ApiError(status, message)
        raise _StopError

    def _broken(self, cause: BaseException | None) -> ApiError | None:
        """Why llhttp stopped: its own reasons, or `cause`, raised by one of the callbacks."""
        if cause is not None and not isinstance(cause, _StopError):
            raise cause
        if self.phase is Phase.STOPPED:
            return None
        self.stop()
        return self._refusal or ApiError(400, "this is not an HTTP/1.1 request")

    def _read_on(self, rest: bytes) -> ApiError | None:
        """Go on behind a head that asked for an upgrade, as if it had not (RFC 9110 7.8).

        llhttp leaves what follows, also the body, to the other protocol. So another parser takes
        over; a head of its own announces the body, if there is one.
        """
        if self.phase is Phase.STOPPED:
            return None
        self._parser = httptools.HttpRequestParser(self)
        if self._unread:
            self._replaying = True
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % self._unread)
            self._replaying = False
            self._unread = b""
        return self.feed(rest) if rest else None


def _target(url: bytes) -> str:
    """Path and query; of an absolute form (RFC 9112 3.2.2) without its scheme and authority."""
    if not url.startswith(b"/") and b"://" in url:
        url = b"/" + url.partition(b"://")[2].partition(b"/")[2]
    return url.decode("latin-1")


def _framing(headers: dict[str, str]) -> bytes:
    """The header line that says how the body is framed; empty if there is no body."""
    if "transfer-encoding" in headers:
        return b"transfer-encoding: chunked\r\n"
    length = int(headers.get("content-length", "0"))
    return b"content-length: %d\r\n" % length if length else b""
