"""Addresses of a store: which URLs are understood, and what the others are answered."""

import pytest

from kvrouter_store.connection.address import Address, parse_url


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("kv://127.0.0.1:7400", Address("127.0.0.1", 7400)),
        ("kv://store.example:1/", Address("store.example", 1)),
        ("kv://[::1]:7400", Address("::1", 7400)),
        ("kvs://store.example:7400", Address("store.example", 7400, tls=True)),
        ("kvs://[::1]:7400", Address("::1", 7400, tls=True)),
        ("kv+unix:///run/kv.sock", Address(path="/run/kv.sock")),
    ],
)
def test_store_urls_are_read(url: str, address: Address) -> None:
    assert parse_url(url) == address
    assert parse_url(str(address)) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:7400",
        "kv://host",
        "http://h:1",
        "kv://h:x",
        "kv://h:1/p",
        "kv+unix://h/p",
        "kvs://h",
    ],
)
def test_what_is_no_store_url_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ValueError, match="write kv://HOST:PORT"):
        parse_url(url)
