"""Web pages of other origins: who may read answers, and what a browser is told before it sends."""

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError
from tests.integration.router.conftest import Open, Site, text

from kvrouter.app.settings import RouterSettings

PAGE = "http://localhost:5173"
ALLOWED, EXPOSED = "access-control-allow-origin", "access-control-expose-headers"
COMPLETIONS = "/v1/completions"


async def ask(here: Site, path: str = COMPLETIONS, **headers: str) -> tuple[int, dict[str, str]]:
    """What a browser asks before it sends a POST with a key; status and headers of the answer."""
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
        **headers,
    }
    async with here.http.options(here.url(path), headers=asked) as answer:
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}


async def test_no_page_may_read_answers_unless_an_option_allows_it(site: Open) -> None:
    here = await site()
    assert (await ask(here))[0] == 405
    _, headers, _ = await here.post(text(), origin=PAGE)
    assert not {ALLOWED, EXPOSED, "vary"} & headers.keys()


@pytest.mark.parametrize("keys", [{}, {"api_key": ["sk-1"]}])
async def test_a_browser_that_asks_needs_no_key(site: Open, keys: dict[str, list[str]]) -> None:
    here = await site(cors_allow_origin=["*"], **keys)
    status, headers = await ask(here)
    assert (status, headers[ALLOWED]) == (204, "*")
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in headers["access-control-allow-methods"]
    assert int(headers["access-control-max-age"]) > 0
    assert "content-length" not in headers
    assert here.decode[0].requests == []
    async with here.http.options(here.url(COMPLETIONS), headers={"origin": PAGE}) as answer:
        assert answer.status == (401 if keys else 405)  # it is no question of a browser


async def test_a_page_reads_streams_and_errors_too(site: Open) -> None:
    here = await site(cors_allow_origin=["*"], api_key=["sk-1"], max_body_memory=1000)
    key = {"authorization": "Bearer sk-1", "origin": PAGE}
    for status, path, body, headers in (
        (200, COMPLETIONS, text(), key),
        (200, COMPLETIONS, text(stream=True), key),
        (400, COMPLETIONS, b"{", key),
        (404, COMPLETIONS, text(model="other"), key),
        (404, "/nowhere", text(), key),
        (401, COMPLETIONS, text(), {"origin": PAGE}),
        (413, COMPLETIONS, b"x" * 1001, key),
    ):
        told, found, _ = await here.post(body, path, **headers)
        assert (told, found[ALLOWED], found[EXPOSED]) == (status, "*", "*"), path


async def test_of_listed_origins_each_gets_its_own_name(site: Open) -> None:
    here = await site(cors_allow_origin=[PAGE, "https://chat.example"])
    for page in (PAGE, "https://chat.example"):
        status, headers = await ask(here, origin=page)
        assert (status, headers[ALLOWED], headers["vary"]) == (204, page, "Origin")
        _, headers, _ = await here.post(text(), origin=page)
        assert (headers[ALLOWED], headers["vary"]) == (page, "Origin")
    status, headers = await ask(here, origin="https://evil.example")
    assert (status, ALLOWED in headers) == (403, False)
    for other in ({"origin": "https://evil.example"}, {}):
        status, headers, _ = await here.post(text(), **other)
        assert (status, headers["vary"], ALLOWED in headers) == (200, "Origin", False)


async def test_no_page_of_another_origin_reaches_the_admin_api(site: Open) -> None:
    here = await site(cors_allow_origin=["*"], admin=True)
    assert (await ask(here, "/workers"))[0] == 403
    async with here.http.get(here.url("/workers"), headers={"origin": PAGE}) as answer:
        assert ALLOWED not in answer.headers


async def test_one_connection_serves_questions_and_requests(site: Open) -> None:
    here = await site(cors_allow_origin=["*"])
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    question = b"OPTIONS /v1/completions HTTP/1.1\r\nHost: h\r\nOrigin: http://a\r\n"
    question += b"Access-Control-Request-Method: POST\r\n\r\n"
    writer.write(question * 2 + b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n")
    for status in (b"204", b"204", b"200"):
        assert status in (await reader.readuntil(b"\r\n\r\n")).splitlines()[0]
    writer.close()


@pytest.mark.parametrize(
    ("given", "origins"),
    [
        ("*", ["*"]),
        ('["*"]', ["*"]),
        (['["http://a", "https://B:443/"]'], ["http://a", "https://b"]),
        (
            "http://a:80,http://[::1]:3000 app://page",
            ["http://a", "http://[::1]:3000", "app://page"],
        ),
        ("https://a:80", ["https://a:80"]),
    ],
)
def test_origins_are_read_as_browsers_send_them(given: Any, origins: list[str]) -> None:
    assert RouterSettings(decode=["d:1"], cors_allow_origin=given).cors_allow_origin == origins


@pytest.mark.parametrize("given", ["chat.example", "https://a/path", "https://*.example", "null"])
def test_what_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(ValidationError, match="give it as https://HOST"):
        RouterSettings(decode=["d:1"], cors_allow_origin=[given])
