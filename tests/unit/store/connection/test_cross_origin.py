"""Pages of other sites in a browser, which reach the node's HTTP port from the user's own host."""

import json

import pytest
from tests.fakes.store import chain_of, manifest_of, put_chain

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.cross_origin import cross_origin_refusal
from kvrouter_store.connection.tokens import bearer_token
from kvrouter_store.node.http_api import HttpApi
from kvrouter_store.node.own_client import OwnClient

OWN = {"host": "127.0.0.1:7480"}
MANIFEST = manifest_of(4096)


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:7480"},
        {"sec-fetch-site": "what-comes-next"},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "null"},
        {"origin": "http://[::"},
        # DNS rebinding: the page and the port have the same name, which the page's site gave out.
        {"origin": "http://evil.example:7480", "host": "evil.example:7480"},
        {"sec-fetch-site": "same-origin", "host": "evil.example:7480"},
        {"sec-fetch-site": "same-origin", "host": ""},
        {"sec-fetch-site": "none", "host": "[::1"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", "PATCH", "MADE-UP"])
def test_a_page_of_another_origin_may_not_change_anything(
    method: str, headers: dict[str, str]
) -> None:
    assert cross_origin_refusal(method, {**OWN, **headers})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "store.example:7480"},  # a program that asks by name
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:7480"},
        {"origin": "http://127.0.0.1:7480"},
        {"origin": "http://LOCALHOST:7480", "host": "localhost:7480"},
        {"origin": "http://a.localhost", "host": "a.localhost"},
        {"origin": "https://[::1]:7480", "host": "[::1]:7480"},
    ],
)
def test_programs_and_pages_of_the_port_itself_may(headers: dict[str, str]) -> None:
    assert not cross_origin_refusal("POST", {**OWN, **headers})


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_what_changes_nothing_is_not_looked_at(method: str) -> None:
    assert not cross_origin_refusal(method, {"sec-fetch-site": "cross-site", **OWN})


async def test_a_page_of_another_site_cannot_purge_a_node_without_tokens(
    server: StoreServer,
) -> None:
    http = HttpApi(server, OwnClient("kv://127.0.0.1:1"))
    with StoreClient(f"kv://127.0.0.1:{server.port}") as client:
        put_chain(client, MANIFEST, chain_of(3))
        for path in ("/purge", "/flush"):
            refused = await http.answer("POST", path, {"origin": "http://evil"})
            assert refused.status == 403
            error = json.loads(refused.body)["error"]
            assert (error["type"], error["code"]) == ("forbidden", 403)
            assert "without a browser" in error["message"]
        assert client.match(MANIFEST, chain_of(3)).blocks == 3
        assert (await http.answer("GET", "/stats", {"origin": "http://evil"})).status == 200
        done = await http.answer("POST", "/purge", {})
        assert json.loads(done.body) == {"status": "ok", "num": 3}


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
def test_the_name_of_a_scheme_is_case_insensitive(scheme: str) -> None:
    assert bearer_token(f"{scheme} abc") == bearer_token(f"{scheme}   abc\t") == "abc"


@pytest.mark.parametrize("given", ["", "abc", "Bearer", "Bearerabc", "Basic abc", " Bearer abc"])
def test_what_is_no_bearer_header_brings_no_token(given: str) -> None:
    assert not bearer_token(given)
