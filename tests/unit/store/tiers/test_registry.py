"""URLs of tiers: what is wrong with one is said in one sentence with the remedy."""

import pytest

from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused
from kvrouter_store.node.tiers import tiers_of
from kvrouter_store.tiers import base
from kvrouter_store.tiers.base import TierRefused
from kvrouter_store.tiers.isolated import Isolated
from kvrouter_store.tiers.registry import open_tier


@pytest.fixture
def _all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda module: object())


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://:secret@host:6380/1?ttl=60",
        "rediss://user:secret@host?ssl_ca_certs=/ca.pem",
        "redis+cluster://a:1,b:2,c:3",
        "valkey://host",
        "valkeys+cluster://:secret@a,b",
        "mooncake://master:50051",
        "mooncake://[::1]?metadata=http://h:8080/metadata&protocol=rdma&devices=mlx5_0&replicas=2",
        "infinistore://host",
        "infinistore://host:1?device=mlx5_0&port=2&link=IB",
    ],
)
@pytest.mark.usefixtures("_all_packages")
def test_a_tier_is_named_without_its_secrets(url: str) -> None:
    name = open_tier(url).name
    assert "secret" not in name
    assert "?" not in name
    assert name.partition("://")[0] == url.partition("://")[0]


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("memcached://host", "begins with redis://"),
        ("host:6379", "begins with redis://"),
        ("redis://host?ttl=soon", "ttl"),
        ("redis://host?ttl=-1", "ttl"),
        ("redis://host:port", "is not understood"),
        ("redis://host?colour=red", "colour"),
        ("redis+cluster://a:1,,b:2", "needs a host"),
        ("mooncake://", "mooncake://HOST:50051"),
        ("mooncake://host:port", "mooncake://HOST:50051"),
        ("mooncake://host?replicas=many", "replicas=2"),
        ("mooncake://host?colour=red", "no option 'colour'"),
        ("infinistore://host?type=TCP", "RDMA alone"),
        ("infinistore://host?link=wifi", "link=Ethernet"),
        ("infinistore://[::1]", "IPv4"),
    ],
)
@pytest.mark.usefixtures("_all_packages")
def test_a_url_that_cannot_be_used_is_refused_with_the_remedy(url: str, remedy: str) -> None:
    with pytest.raises(TierRefused, match=remedy):
        open_tier(url)


def test_a_url_is_read_before_its_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda module: None)
    for url in ("mooncake://", "mooncake://host?colour=red", "infinistore://"):
        with pytest.raises(TierRefused, match=r"names no host|no option 'colour'"):
            open_tier(url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda module: None)
    for url, package in (
        ("redis://host", "redis"),
        ("mooncake://host", "mooncake-transfer-engine"),
        ("infinistore://host", "infinistore"),
    ):
        with pytest.raises(TierRefused, match=f"pip install '{package}"):
            open_tier(url)


@pytest.mark.usefixtures("_all_packages")
def test_native_clients_get_a_process_of_their_own() -> None:
    assert isinstance(open_tier("mooncake://host"), Isolated)
    assert isinstance(open_tier("infinistore://host"), Isolated)
    assert not isinstance(open_tier("redis://host"), Isolated)


def test_a_node_does_not_start_with_a_tier_that_it_does_not_know() -> None:
    with pytest.raises(StartRefused, match="ftp"):
        tiers_of(StoreSettings(tier="redis://a ftp://b"))  # type: ignore[arg-type]


def test_a_tier_that_is_named_twice_is_refused_without_its_secrets() -> None:
    with pytest.raises(StartRefused, match="names redis://a 2 times: give each tier once"):
        tiers_of(StoreSettings(tier="redis://:secret@a redis://a?ttl=5"))  # type: ignore[arg-type]


@pytest.mark.parametrize("between", [" ", ",", ", ", "\n"])
def test_tiers_may_be_one_text_with_spaces_or_commas_or_a_list(between: str) -> None:
    urls = ["redis://a", "redis+cluster://b:1,c:2", "mooncake://d"]
    for given in (between.join(urls), [between.join(urls[:2]), urls[2]]):
        settings = StoreSettings(tier=given)  # type: ignore[arg-type]
        assert [url.get_secret_value() for url in settings.tier] == urls
    assert "redis" not in repr(StoreSettings(tier=["redis://a"]))  # type: ignore[list-item]
