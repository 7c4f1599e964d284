"""Whose request it is: nobody can choose it who is not trusted to."""

import time
from ipaddress import ip_network
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.access.callers import Caller
from kvrouter.admission.tenants import Tenants
from kvrouter.app.settings import RouterSettings
from kvrouter.credentials.caller_keys import Key

PROXIES = [ip_network("10.0.0.0/8"), ip_network("fd00::/8")]


def request(peer: str, headers: dict[str, str] | None = None, key: str | None = None) -> Any:
    """An exchange as far as its tenant follows from it."""
    caller = Caller(Key(key, ()), time.monotonic) if key is not None else None
    return SimpleNamespace(peer=peer, headers=headers or {}, principal=caller)


@pytest.mark.parametrize(
    ("peer", "tenant"),
    [
        ("192.0.2.1:80", "192.0.2.1"),
        ("::ffff:192.0.2.1:80", "192.0.2.1"),
        ("2001:db8:0:1:2:3:4:5:80", "2001:db8:0:1::/64"),
        ("[2001:db8:0:1::9]:80", "2001:db8:0:1::/64"),
        ("fe80::1%eth0:80", "fe80::/64"),
        ("::1:80", "::/64"),
        ("", ""),
        ("socket:0", "socket"),
    ],
)
def test_a_client_without_a_key_is_its_address(peer: str, tenant: str) -> None:
    assert Tenants("x-tenant").of(request(peer, {"x-tenant": "a"})) == tenant
    assert Tenants("x-tenant", PROXIES).of(request(peer, {"x-forwarded-for": "a"})) == tenant
    assert Tenants("x-tenant", PROXIES).of(request(peer, {"x-tenant": "a"}, key="k")) == "k"


@pytest.mark.parametrize(
    ("told", "tenant"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1, 10.0.0.2, 10.0.0.3", "192.0.2.1"),
        ("203.0.113.5, 192.0.2.1,10.0.0.2", "192.0.2.1"),  # the first is the client's own word
        ("10.9.9.9, 192.0.2.1", "192.0.2.1"),
        ("192.0.2.1:4711, [fd00::2]:80", "192.0.2.1"),
        ("2001:db8::1, 10.0.0.2", "2001:db8::/64"),
        ("[2001:db8::1]:4711", "2001:db8::/64"),
        ("192.0.2.1, unknown", "10.0.0.1"),
        ("10.0.0.2", "10.0.0.1"),
        ("", "10.0.0.1"),
        (",,", "10.0.0.1"),
    ],
)
def test_a_trusted_proxy_tells_whom_it_has_a_request_from(told: str, tenant: str) -> None:
    for header in ("x-forwarded-for", "x-tenant"):
        tenants = Tenants(header, PROXIES)
        assert tenants.of(request("10.0.0.1:80", {"x-forwarded-for": told})) == tenant
    assert Tenants("x-tenant", PROXIES).of(request("10.0.0.1:80")) == "10.0.0.1"


def test_a_trusted_proxy_names_tenants_by_the_header_that_it_is_told() -> None:
    tenants = Tenants("x-tenant", PROXIES)
    headers = {"x-tenant": "research", "x-forwarded-for": "192.0.2.1"}
    assert tenants.of(request("10.0.0.1:80", headers)) == "research"
    assert tenants.of(request("fd00::7:80", headers)) == "research"
    assert tenants.of(request("11.0.0.1:80", headers)) == "11.0.0.1"
    tenants.follow("x-tenant", [])
    assert tenants.of(request("10.0.0.1:80", headers)) == "10.0.0.1"
    tenants.follow("x-other", PROXIES)
    assert tenants.of(request("10.0.0.1:80", headers)) == "192.0.2.1"


words = st.text(st.characters(codec="latin-1"), max_size=30) | st.sampled_from(
    ["10.0.0.2", "192.0.2.1", "fd00::1", "[::1]:80", "::", "1.2.3.4.5", "10.0.0.2, 10.0.0.3"]
)


@given(st.lists(words, max_size=5).map(", ".join), words)
def test_whatever_headers_say_there_is_a_tenant_of_a_bounded_length(told: str, peer: str) -> None:
    tenants = Tenants("x-forwarded-for", PROXIES)
    for exchange in (request("10.0.0.1:80", {"x-forwarded-for": told}), request(peer)):
        assert len(tenants.of(exchange)) <= max(64, len(peer))


@pytest.mark.parametrize("bad", ["10.0.0.0/33", "nginx", "10.0.0.1-10.0.0.9"])
def test_a_proxy_that_is_no_network_is_refused_with_the_remedy(bad: str) -> None:
    with pytest.raises(ValueError, match="ADDRESS/BITS"):
        RouterSettings(decode=["a:1"], trusted_proxies=[bad])


def test_proxies_are_written_as_networks_or_addresses() -> None:
    settings = RouterSettings(decode=["a:1"], trusted_proxies=["10.1.2.3/8,192.0.2.1", "fd00::/8"])
    assert settings.trusted_proxies == ["10.0.0.0/8", "192.0.2.1/32", "fd00::/8"]
