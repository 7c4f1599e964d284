"""Endpoints that are functions: our own server and Quart show them the same requests."""

from collections.abc import AsyncIterator

import orjson
import pytest
import pytest_asyncio
from tests.unit.router.http.conftest import Serve, Wire

from kvrouter.control.page.server import WebServer
from kvrouter.control.page.web import control_app
from kvrouter.errors import ApiError
from kvrouter.http.server.respond import HttpRequest, HttpResponse, as_json
from kvrouter.http.server.routes import on_exchange, on_path

ASKED = (
    b"POST /echo/a%2Fb//c?x=%20y&x=2 HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n"
    b"X-Two: 1\r\nX-Two: 2\r\nCookie: a\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\n{}"
)


def echo(request: HttpRequest) -> HttpResponse:
    return as_json(200, {**request._asdict(), "body": request.body.decode()}, (("x-mine", "1"),))


def refuse(_: HttpRequest) -> HttpResponse:
    raise ApiError(401, "Not you.")


@pytest_asyncio.fixture
async def wires(serve: Serve) -> AsyncIterator[list[Wire]]:
    """To one server of each kind, which answer alike."""
    ways = (("POST", "/echo/"), ("GET", "/echo/"), ("POST", "/below/"))
    respond = on_path([("GET", "/no", refuse), *((method, path, echo) for method, path in ways)])
    web = WebServer(control_app(respond))
    ports = (await serve(on_exchange(respond))).port, await web.listen("127.0.0.1", 0)
    dialled = [await Wire.dial(port) for port in ports]
    yield dialled
    for wire in dialled:
        wire.close()
    await web.close()


async def test_both_servers_show_the_same_request_and_send_the_same_answer(
    wires: list[Wire],
) -> None:
    for wire in wires:
        wire.send(ASKED)
        status, headers, body = await wire.answer()
        seen = orjson.loads(body)
        assert (status, headers["x-mine"]) == (200, "1")
        assert headers["content-type"] == "application/json"
        assert (seen["method"], seen["path"]) == ("POST", "/echo/a%2Fb//c")
        assert (seen["query"], seen["body"]) == ("x=%20y&x=2", "{}")
        assert (seen["headers"]["x-two"], seen["headers"]["cookie"]) == ("1, 2", "a")


@pytest.mark.parametrize(
    ("asked", "status", "header"),
    [
        (b"GET /no", 401, ("www-authenticate", "Bearer")),
        (b"GET /nothing", 404, ("content-type", "application/json")),
        (b"GET //no", 404, ("content-type", "application/json")),
        (b"GET /echo", 404, ("content-type", "application/json")),
        (b"DELETE /echo/a", 405, ("allow", "GET, POST")),
        (b"OPTIONS /no", 405, ("allow", "GET")),
        (b"GET /below/a", 404, ("content-type", "application/json")),
    ],
)
async def test_both_servers_refuse_alike(
    wires: list[Wire], asked: bytes, status: int, header: tuple[str, str]
) -> None:
    told = []
    for wire in wires:
        wire.send(asked + b" HTTP/1.1\r\nHost: h\r\n\r\n")
        got, headers, body = await wire.answer()
        assert (got, headers[header[0]]) == (status, header[1])
        told.append(orjson.loads(body)["error"])
    assert told[0] == told[1]


async def test_a_head_is_answered_as_a_get_without_its_body(wires: list[Wire]) -> None:
    for wire in wires:
        wire.send(b"HEAD /echo/x HTTP/1.1\r\nHost: h\r\n\r\n")
        status, headers = await wire.head()
        assert (status, headers["x-mine"]) == (200, "1")
        assert int(headers["content-length"]) > 0
        wire.send(b"GET /no HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await wire.answer())[0] == 401
