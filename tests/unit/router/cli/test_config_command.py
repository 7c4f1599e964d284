"""`kvrouter config show`, `check` and `schema`; variables of the environment."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvrouter.app.settings import RouterSettings
from kvrouter.cli.config_command import json_schema
from kvrouter.cli.main import COMMANDS, imported, main
from kvrouter.options.complaints import UsageError
from kvrouter.options.load import load
from kvrouter.options.option import options

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("KVROUTER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "router.yaml"


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["config", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_file_without_fault_is_said_to_be_so(
    capsys: pytest.CaptureFixture[str], written: Path
) -> None:
    written.write_text("decode: [d:1]\nqueue-size: 5\n")
    assert main(["config", "check", str(written)]) == 0
    assert capsys.readouterr().out == f"{written}: 2 settings of kvrouter serve, nothing wrong\n"


def test_all_that_is_wrong_with_a_file_is_told_at_once_with_its_lines(
    capsys: pytest.CaptureFixture[str], written: Path
) -> None:
    written.write_text("decode: [d:1]\nque-size: 5\nport: x\n\nport: 7\nlog_level: loud\n")
    assert told(capsys, "check", str(written)) == [
        f"{written}:2: no setting 'que-size'; did you mean queue_size?",
        f"{written}:5: 'port' is already on line 3; give it once",
        f"port (file {written}:3) 'x': give a whole number",
        f"log_level (file {written}:6) 'loud': give 'debug', 'info', 'warning' or 'error'",
    ]


def test_a_file_is_checked_for_the_command_and_with_the_flags_that_are_named(
    capsys: pytest.CaptureFixture[str], written: Path
) -> None:
    written.write_text("queue_size: 5\n")
    assert "no engine for decode legs" in told(capsys, "check", str(written))[0]
    assert main(["config", "check", str(written), "--decode", "d:1"]) == 0
    capsys.readouterr()
    assert "no setting 'queue_size'" in told(capsys, "check", str(written), "store")[0]
    written.write_text("name: n\n")
    assert main(["config", "check", str(written), "key", "new"]) == 0


def test_a_tokenizer_that_is_not_there_is_told_before_the_router_starts(
    capsys: pytest.CaptureFixture[str], written: Path, tmp_path: Path
) -> None:
    written.write_text(f"decode: [d:1]\ntokenizer: {tmp_path / 'absent'}\n")
    assert told(capsys, "check", str(written)) == [
        f"tokenizer (file {written}:2): there is no file {tmp_path / 'absent'}: give a "
        "tokenizer.json or the directory that holds it"
    ]
    empty = tmp_path / "empty"
    empty.mkdir()
    written.write_text(f"decode: [d:1]\ntokenizer: {empty}\n")
    assert f"there is no file {empty / 'tokenizer.json'}" in told(capsys, "check", str(written))[0]
    (empty / "tokenizer.json").write_text("{}")
    assert main(["config", "check", str(written)]) == 0


@pytest.mark.parametrize("words", [["check"], ["show"], ["check", "f", "sreve"], ["schema", "x"]])
def test_an_action_without_what_it_needs_is_wrong_use(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (sentence,) = told(capsys, *words)
    assert sentence.startswith(f"kvrouter config {words[0]}: name a ")
    assert f"(usage: kvrouter config {words[0]} " in sentence


@pytest.mark.parametrize("action", ["show", "check", "schema", "docs"])
def test_every_action_has_a_help(capsys: pytest.CaptureFixture[str], action: str) -> None:
    assert main(["config", action, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: kvrouter config {action}")


def test_whence_a_value_came_is_said_to_the_line(
    capsys: pytest.CaptureFixture[str], written: Path
) -> None:
    written.write_text("# ours\ndecode: [d:1]\n\nqueue-size: 5\n")
    assert main(["config", "show", "serve", "--config", str(written)]) == 0
    assert f"queue_size: 5  # file {written}:4\n" in capsys.readouterr().out


def test_a_variable_that_resembles_a_setting_and_is_none_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVROUTER_QUEUE_SIZES", "4")
    wanted = "no setting KVROUTER_QUEUE_SIZES; did you mean KVROUTER_QUEUE_SIZE?"
    with pytest.raises(UsageError, match=wanted.replace("?", r"\?")):
        load(RouterSettings, {"decode": ["d:1"]})
    load(RouterSettings, {"decode": ["d:1"]}, elsewhere=lambda: {"KVROUTER_QUEUE_SIZES"})


def test_variables_of_other_commands_and_of_kubernetes_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for command in COMMANDS:
        for option in options(imported(command.settings)):
            if option.kind == "value" and option.name.startswith("tls_"):
                monkeypatch.setenv(option.env, "")
    monkeypatch.setenv("KVROUTER_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KVROUTER_PORT_8000_TCP_ADDR", "10.0.0.1")
    assert main(["config", "show", "serve", "--decode", "d:1"]) == 0


def service(name: str, port: int, scheme: str = "tcp") -> dict[str, str]:
    """What Kubernetes sets for a Service in the environment of every Pod."""
    upper, host = name.upper().replace("-", "_"), "10.0.0.1"
    url, one = f"{scheme}://{host}:{port}", f"{upper}_PORT_{port}_{scheme.upper()}"
    return {
        f"{upper}_SERVICE_HOST": host,
        f"{upper}_SERVICE_PORT": str(port),
        f"{upper}_SERVICE_PORT_HTTP": str(port),
        f"{upper}_PORT": url,
        one: url,
        f"{one}_PROTO": scheme,
        f"{one}_PORT": str(port),
        f"{one}_ADDR": host,
    }


@pytest.mark.parametrize("scheme", ["tcp", "udp", "sctp"])
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("serve --decode d:1", "kvrouter"),
        ("serve --decode d:1", "kvrouter-decode"),
        ("serve --decode d:1", "kvrouter-prefill"),
        ("serve --decode d:1", "kvrouter-control"),
        ("serve --decode d:1", "kvrouter-bootstrap"),
        ("store", "kvrouter-store"),
        ("store", "kvrouter-store-http"),
        ("sim --model m", "kvrouter-sim"),
    ],
)
def test_what_kubernetes_sets_for_a_service_is_ignored_with_one_warning(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    name: str,
    scheme: str,
) -> None:
    assert main(["config", "show", *command.split()]) == 0
    without = capsys.readouterr().out
    for variable, value in service(name, 8000, scheme).items():
        monkeypatch.setenv(variable, value)
    assert main(["config", "show", *command.split()]) == 0
    shown = capsys.readouterr()
    assert shown.out == without
    (warning,) = shown.err.splitlines()
    assert f"{name.upper().replace('-', '_')}_PORT and 7 more ignored: Kubernetes" in warning
    assert "enableServiceLinks: false" in warning


def test_a_variable_of_ours_that_looks_like_one_of_kubernetes_is_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVROUTER_PORT", "8123")
    monkeypatch.setenv("KVROUTER_KV_EVENTS_BIND", "tcp://127.0.0.1:5557")
    assert main(["config", "show", "serve", "--decode", "d:1"]) == 0
    shown = capsys.readouterr()
    assert "port: 8123  # environment KVROUTER_PORT" in shown.out
    assert 'kv_events_bind: "tcp://127.0.0.1:5557"  # environment' in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_schema_takes_every_setting_and_nothing_else(
    capsys: pytest.CaptureFixture[str], command: Any
) -> None:
    assert main(["config", "schema", *command.name.split()]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    model = imported(command.settings)
    for option in options(model):
        assert schema["properties"][option.name]["description"] == option.help
        assert option.name.replace("_", "-") in schema["properties"]
    with pytest.raises(jsonschema.ValidationError, match="Additional properties"):
        jsonschema.validate({"no_such_setting": 1}, schema)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("serve", "decode: d:1,e:2\nprefill: [a:1]\nqueue-size: 5\nadmin: true\n"),
        (
            "serve",
            "decode: d:1\nmodel_alias: {c: {a: 9, b: 0.5}}\nmodel_prefill_threshold: {a: 1}\n",
        ),
        ("store", "memory: 8GiB\nunix_socket_mode: '0660'\nquota: [a=1GiB, b=10%]\n"),
        ("sim", "model: m\ntime_to_first_token: 100ms\ninter_token_latency: 3\nrole: decode\n"),
        ("key new", "name: n\n"),
    ],
)
def test_the_schema_takes_what_the_command_takes(
    capsys: pytest.CaptureFixture[str], written: Path, command: str, text: str
) -> None:
    written.write_text(text)
    model = imported(next(c for c in COMMANDS if c.name == command).settings)
    jsonschema.validate(yaml.safe_load(text), json_schema(command, model))
    assert main(["config", "check", str(written), *command.split()]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "text", ["queue_size: -1\n", "policy: best\n", "port: [1]\n", "admin: 3\n", "decode: {}\n"]
)
def test_the_schema_refuses_what_the_command_refuses(
    capsys: pytest.CaptureFixture[str], written: Path, text: str
) -> None:
    written.write_text(text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), json_schema("serve", RouterSettings))
    assert told(capsys, "check", str(written), "--kv-events-bind", "tcp://127.0.0.1:0")
