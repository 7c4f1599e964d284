"""What a connector is told of the store; what it cannot mean is refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.certificates import Authority

from kvrouter_store.connection.tls import ClientTls
from kvrouter_store.connectors.settings import ConnectorRefused, ConnectorSettings

URL = {"url": "kv://127.0.0.1:7400"}


def test_the_token_is_taken_from_the_configuration_or_the_environment_and_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, inherited = "g" * 32, "i" * 32
    assert ConnectorSettings.parse(URL, "kv_both").token == ""
    monkeypatch.setenv("KVROUTER_STORE_TOKEN", inherited)
    assert ConnectorSettings.parse(URL, "kv_both").token == inherited
    monkeypatch.setenv("KVROUTER_STORE_TOKEN", f"{inherited}\n")  # of a Secret made of a file
    assert ConnectorSettings.parse(URL, "kv_both").token == inherited
    settings = ConnectorSettings.parse(URL | {"token": given}, "kv_both")
    assert settings.token == given
    assert given not in repr(settings)


def test_a_token_that_cannot_be_one_is_refused_without_repeating_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConnectorRefused, match='"token"') as refused:
        ConnectorSettings.parse(URL | {"token": "too short"}, "kv_both")
    assert "too short" not in str(refused.value)
    monkeypatch.setenv("KVROUTER_STORE_TOKEN", "too short")
    with pytest.raises(ConnectorRefused, match="KVROUTER_STORE_TOKEN") as refused:
        ConnectorSettings.parse(URL, "kv_both")
    assert "too short" not in str(refused.value)


def test_files_for_tls_are_taken_from_the_configuration_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    url = {"url": "kvs://127.0.0.1:7400"}
    assert ConnectorSettings.parse(url, "kv_both").tls == ClientTls()
    monkeypatch.setenv("KVROUTER_STORE_CA_FILE", theirs.ca_file)
    assert ConnectorSettings.parse(url, "kv_both").tls == theirs.trust
    given = ConnectorSettings.parse(url | {"ca_file": ours.ca_file}, "kv_both")
    assert given.tls == ours.trust
    # What the environment says for stores under TLS is no matter to a plain one.
    assert ConnectorSettings.parse(URL, "kv_both").tls == ClientTls()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"url": "kvs://127.0.0.1:7400", "ca_file": "/nowhere.pem"}, "CA file /nowhere.pem"),
        ({"url": "kvs://127.0.0.1:7400", "cert_file": "/a.pem"}, "go together"),
        ({"ca_file": "/nowhere.pem"}, "write kvs://"),
        ({"url": "http://127.0.0.1:7400"}, "write kv://HOST:PORT"),
        ({"ca_file": 7}, '"ca_file" must be a string'),
    ],
)
def test_files_for_tls_that_cannot_be_used_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConnectorRefused, match=told):
        ConnectorSettings.parse({**URL, **wrong}, "kv_both")


@pytest.mark.parametrize(
    "wrong",
    [
        {"uri": "kv://127.0.0.1:7400"},
        {"save": "some"},
        {"transport": "pigeon"},
        {"verify": "no"},
        {"deadline_s": 0},
        {"deadline_s": True},
        {"name": 7},
        {"neighbours": ["kv://b:7400"]},
    ],
)
def test_a_setting_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConnectorRefused, match=next(iter(wrong))):
        ConnectorSettings.parse({**URL, **wrong}, "kv_both")


@pytest.mark.parametrize(
    ("role", "save"), [("kv_both", "all"), ("kv_producer", "all"), ("kv_consumer", "none")]
)
def test_a_consumer_saves_only_when_told(role: str, save: str) -> None:
    assert ConnectorSettings.parse(URL, role).save == save
    assert ConnectorSettings.parse({**URL, "save": "prompt"}, role).save == "prompt"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"neighbours": "b"}, "write kv://HOST:PORT"),
        ({"advertise": "b:7400"}, "write kv://HOST:PORT"),
    ],
)
def test_other_nodes_that_cannot_be_reached_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConnectorRefused, match=told):
        ConnectorSettings.parse({**URL, **wrong}, "kv_both")


def test_a_neighbour_without_tls_beside_files_for_tls_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    settings = {"url": "kvs://a:7400", "ca_file": authority.ca_file, "neighbours": "kv://b:7400"}
    with pytest.raises(ConnectorRefused, match="write kvs://"):
        ConnectorSettings.parse(settings, "kv_both")


def test_another_node_is_reached_with_the_same_settings_and_not_by_shared_memory() -> None:
    settings = ConnectorSettings.parse({**URL, "transport": "shm", "token": "t" * 32}, "kv_both")
    assert settings.at("") is settings
    there = settings.at("kv://b:7400")
    assert (there.url, there.transport, there.token) == ("kv://b:7400", "auto", "t" * 32)
    assert (
        ConnectorSettings.parse({**URL, "transport": "tcp"}, "kv_both").at("x").transport == "tcp"
    )


@pytest.mark.parametrize(
    "old",
    [
        {"check_puts": False},
        {"digest_puts": False, "verify": True},
        {"check_puts": True, "digest_puts": True},
    ],
)
def test_a_setting_of_earlier_versions_has_no_effect_and_says_so_once(
    old: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    assert ConnectorSettings.parse({**URL, **old}, "kv_both") == ConnectorSettings.parse(
        URL, "kv_both"
    )
    (line,) = caplog.messages
    assert "check_puts and digest_puts are deprecated" in line
    assert "kvrouter store --digests off" in line
