"""--discovery as users give it: by flag, environment and file, and what is refused."""

from pathlib import Path

import pytest

from kvrouter.app.settings import RouterSettings
from kvrouter.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["serve", *flags]) == 2
    return capsys.readouterr().err


def test_a_router_with_a_source_needs_no_engine() -> None:
    assert RouterSettings(discovery=["engines.yaml"]).engines == {}
    with pytest.raises(ValueError, match="--discovery"):
        RouterSettings()


def test_sources_are_given_by_flag_environment_and_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "router.yaml"
    config.write_text("discovery: [my engines.yaml, 'dns://a:1?role=decode']\n")

    def shown(*flags: str) -> str:
        assert main(["config", "show", "serve", *flags]) == 0
        line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("discovery:"))
        return line.partition("  #")[0]

    by_file = shown("--config", str(config))
    assert by_file == 'discovery: ["my engines.yaml", "dns://a:1?role=decode"]'
    monkeypatch.setenv("KVROUTER_DISCOVERY", "one.yaml,srv://b?role=prefill two.yaml")
    assert shown() == 'discovery: ["one.yaml", "srv://b?role=prefill", "two.yaml"]'
    by_flag = shown("--discovery", "a b.yaml", "c.yaml", "--discovery-file", "d.yaml")
    assert by_flag == 'discovery: ["a b.yaml", "c.yaml", "d.yaml"]'


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "etcd://a:1",
            "no discovery by etcd://: give a file's path, `redis`, or one of dns://, srv://, k8s://",
        ),
        ("", "give a file's path, or a URL"),
        ("file://host/engines.yaml", "give a file as its path, or as file:///PATH"),
        ("redis", "--discovery redis needs --redis redis://HOST:PORT/DB"),
        ("redis://a:1", "give --discovery redis for the Redis of --redis URL"),
        ("dns://a:1", "say ?role=prefill or ?role=decode or ?role=both or ?role=store"),
    ],
)
def test_what_is_no_source_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], source: str, complaint: str
) -> None:
    told = refused(capsys, "--discovery", source)
    assert complaint in told
    assert told.count("\n") == 1


def test_one_source_cannot_be_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "--discovery", "e.yaml", "dns://a:1?role=decode", "file:///e.yaml",
                   "dns://a:1?role=decode&interval=1")  # fmt: skip
    assert "discovery dns://a:1?role=decode is given twice; leave one out" in told
    assert RouterSettings(discovery=["e.yaml", "e.yaml"]).discovery == ["e.yaml"]
