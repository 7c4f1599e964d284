"""The command line: flags, environment and file; what it says of wrong use; help and exit codes."""

import errno
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import kvrouter
from kvrouter.app.settings import RouterSettings
from kvrouter.cli.main import COMMANDS, CONFIG, Command, imported, main
from kvrouter.cli.run_command import run_command
from kvrouter.options.complaints import UsageError
from kvrouter.options.load import load
from kvrouter.options.option import options
from kvrouter.tools.docs.configuration import configuration_page

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[4]
ENGINES = ["--prefill", "p:1", "--decode", "d:1"]


WRONG_VALUES: tuple[Any, ...] = (
    *("", "x", "-1", "1e999", "\udc80", None, [], {}, {"x": 1}, [None, 1, 2], 1.5, -1),
)


def complaints_of(command: Command, given: dict[str, Any]) -> tuple[str, ...]:
    try:
        load(imported(command.settings), given)
    except UsageError as error:
        return error.sentences
    return ()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("KVROUTER_"):
            monkeypatch.delenv(name)


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, str]:
    assert main(["config", "show", "serve", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split(": ", 1) for line in lines)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_flag_wins_over_environment_over_file_over_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "kvrouter.yaml"
    given = [*ENGINES, "--config", str(config)]
    config.write_text("host: 127.0.0.2\n")
    assert shown(capsys, *given)["port"] == "8000  # default"
    config.write_text("port: 1\nprefill-threshold: 5\n")
    assert shown(capsys, *given)["port"] == f"1  # file {config}:1"
    monkeypatch.setenv("KVROUTER_PORT", "2")
    assert shown(capsys, *given)["port"] == "2  # environment KVROUTER_PORT"
    values = shown(capsys, *given, "--port", "3")
    assert values["port"] == "3  # flag"
    assert values["prefill_threshold"] == f"5  # file {config}:2"


def test_engines_may_be_repeated_listed_or_joined_by_commas(
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = ["--decode", "a:1", "http://b:2", "--decode", "c:3,d:4", "--decode", "a:1"]
    assert shown(capsys, *written)["decode"] == '["a:1", "b:2", "c:3", "d:4"]  # flag'


def test_lists_in_the_environment_are_split_at_commas_and_blanks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVROUTER_DECODE", "a:1, b:2 http://c:3")
    assert shown(capsys)["decode"].startswith('["a:1", "b:2", "c:3"]')


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "no engine for decode legs: give --decode URL"),
        (["--decode", "d"], "--decode: engine 'd': give it as http://HOST:PORT"),
        (["--decode", "kv://d:1"], "give it as http://HOST:PORT or https://HOST:PORT"),
        ([*ENGINES, "--port", "70000"], "--port '70000': give at most 65535"),
        ([*ENGINES, "--port", "x"], "--port 'x': give a whole number"),
        ([*ENGINES, "--prefill-threshold", "-1"], "--prefill-threshold '-1': give at least 0"),
        (
            [*ENGINES, "--store", "redis://x"],
            "give it to `kvrouter store --tier`, and kv://HOST:PORT",
        ),
        ([*ENGINES, "--kv-events-bind", "127.0.0.1"], "give it as tcp://HOST:PORT"),
        ([*ENGINES, "--bootstrap-port", "a:1=0"], "give it as PORT or HOST:PORT=PORT"),
        ([*ENGINES, "--data-parallel-size", "0"], "--data-parallel-size: '0': give it as COUNT or"),
        ([*ENGINES, "--data-parallel-size", "d=2"], "give it as http://HOST:PORT or HOST:PORT"),
        ([*ENGINES, "--landing-timeout", "0"], "--landing-timeout '0': give more than 0"),
        (
            [*ENGINES, "--config", "/nowhere.yaml"],
            "No such file or directory; give a readable file",
        ),
    ],
)
def test_wrong_use_is_told_in_one_sentence_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    told = refused(capsys, "serve", *flags)
    assert complaint in told
    assert told.endswith("(see kvrouter serve --help)\n")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("- a\n", "not a mapping"),
        ("a: [\n", "not YAML"),
        ("prot: 1\n", "no setting 'prot'; did you mean port?"),
        ("port: x\n", "'x': give a whole number"),
    ],
)
def test_a_wrong_file_is_told_with_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, complaint: str
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(content)
    assert complaint in refused(capsys, "serve", *ENGINES, "--config", str(config))


def test_an_empty_file_sets_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("")
    assert shown(capsys, *ENGINES, "--config", str(config))["port"] == "8000  # default"


def test_a_wrong_environment_is_told_by_the_variables_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVROUTER_POLICY", "best")
    told = refused(capsys, "serve", *ENGINES)
    assert "policy (environment KVROUTER_POLICY) 'best': give 'round_robin'" in told


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--nonsense"], "there is no flag --nonsense"),
        (["--pol=prefix"], "there is no flag --pol; did you mean --policy?"),
        (["--queue-sise=4"], "there is no flag --queue-sise; did you mean --queue-size?"),
        (["--queue-sise", "4"], "there is no flag --queue-sise; did you mean --queue-size?"),
        (["--port"], "--port lacks its value; write --port PORT"),
        (["--decode"], "--decode lacks its value; write --decode URL"),
        (["--landing-timeout"], "--landing-timeout lacks its value; write --landing-timeout"),
        (["--policy"], "write --policy {round_robin,least_tokens,prefix,planner}"),
        (["--config"], "--config lacks its value; write --config FILE"),
        (["--admin=yes"], "--admin takes no value; write it alone"),
        (["--help=serve"], "--help takes no value; write it alone"),
        (["--port", "1", "stray"], "'stray' belongs to no flag; leave it out or name its flag"),
        (
            ["--policy", "best"],
            "--policy 'best': give 'round_robin', 'least_tokens', 'prefix' or 'planner'",
        ),
    ],
)
def test_a_wrong_flag_is_one_sentence_with_the_remedy(
    capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    told = refused(capsys, "serve", *ENGINES, *flags)
    assert told.startswith("kvrouter serve: ")
    assert complaint in told
    assert told.endswith("(see kvrouter serve --help)\n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--prefiller-hosts a", "no flag --prefiller-hosts; use --prefill: HOST:PORT of each"),
        ("--decoder-port 1", "no flag --decoder-port; use --decode: HOST:PORT of each engine"),
        ("--worker-urls a b", "no flag --worker-urls; use --decode: engines that take whole"),
        ("--cache-threshold=0.5", "no flag --cache-threshold; leave it out: cached and waiting"),
        ("--retry-max-backoff-ms 5", "no flag --retry-max-backoff-ms; leave it out: another"),
        ("--prefill-selector a=b", "no flag --prefill-selector; use --discovery: k8s://NAMESPACE"),
        ("--routing-logic session", "no flag --routing-logic; use --session-key: with --policy"),
        ("--routing-logic kvaware", "use --policy and --kv-events-connect: prefix; KV events"),
        ("--routing-logic best", "no flag --routing-logic; use --policy: round_robin"),
        (
            "--policy cache_aware",
            "'cache_aware': give 'round_robin', 'least_tokens', 'prefix' or 'planner'; ",
        ),
        ("--policy manual", "; use --session-key: with --policy prefix"),
        (
            "--prefill http://p:1 8998",
            "'8998': give it as http://HOST:PORT or HOST:PORT; use --pre",
        ),
    ],
)
def test_a_flag_of_another_router_is_answered_with_ours(
    capsys: pytest.CaptureFixture[str], flags: str, told: str
) -> None:
    assert told in refused(capsys, "serve", *ENGINES, *flags.split())


def test_all_flags_of_a_foreign_command_line_are_answered_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "--worker-urls http://a:1 --queue-size 5 --dp-aware --nonsense -1 --log-dir /tmp"
    assert main(["serve", *line.split()]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [re.findall(r"no flag (\S+)", each.replace(";", " ")) for each in told] == [
        ["--worker-urls"],
        ["--dp-aware"],
        ["--nonsense"],
        ["--log-dir"],
    ]
    assert told[-1].endswith("(see kvrouter serve --help)")


@pytest.mark.parametrize("command", ["store", "sim"])
def test_what_is_no_router_has_no_answers_for_flags_of_routers(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert "--decode" not in refused(capsys, command, "--worker-urls", "a")


def test_choices_may_be_written_in_capitals(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, *ENGINES, "--log-level", "DEBUG")["log_level"] == '"debug"  # flag'


def test_aliases_of_a_flag_set_the_same_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, *ENGINES, "--landing-timeout", "7")["landing_timeout_s"] == "7.0  # flag"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_says_what_each_of_its_flags_means(
    capsys: pytest.CaptureFixture[str], command: object
) -> None:
    assert hasattr(command, "settings")
    model = imported(command.settings)
    with pytest.raises(SystemExit) as ended:
        main([*command.name.split(), "--help"])  # type: ignore[attr-defined]
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for option in options(model):
        assert option.help, option.name
        for flag in option.shown:
            assert flag in told or flag.replace("--", "--no-", 1) in told
    assert all(model.model_fields[option.name].description for option in options(model))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_flag_stands_under_a_heading_and_says_what_its_value_is(command: Command) -> None:
    for option in options(imported(command.settings)):
        assert option.section, option.name
        assert option.help.endswith("."), option.name
        if option.kind in ("list", "value"):
            assert re.fullmatch(r"(?!TEXT)[A-Z]+([:=,-]([A-Z]+|\.\.\.))?", option.metavar), (
                option.name
            )


def test_required_flags_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    for command, first in (("sim", "--model NAME"), ("serve", "--prefill URL"), ("key new", "")):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        heading, flag = capsys.readouterr().out.split("\n\n")[2].splitlines()[:2]
        assert heading == ("Engines:" if command == "serve" else "Required:")
        assert flag.strip().startswith(first)


@pytest.mark.parametrize(
    ("command", "flag", "default"),
    [
        ("serve", "max_body_memory", "512MiB"),
        ("serve", "admin", "off"),
        ("serve", "request_timeout_s", "600"),
        ("serve", "store", ""),
        ("store", "unix_socket_mode", "0600"),
        ("sim", "store_deadline", "2s"),
    ],
)
def test_a_default_is_shown_as_a_user_would_type_it(command: str, flag: str, default: str) -> None:
    model = imported(next(each for each in COMMANDS if each.name == command).settings)
    assert {each.name: each.default for each in options(model)}[flag] == default


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_default_that_is_shown_can_be_given(command: Command) -> None:
    model = imported(command.settings)
    given = {"decode": "d:1", "redis": "redis://h:1/0", "model": "m", "name": "n"}
    needed = {name: value for name, value in given.items() if name in model.model_fields}
    shown = {each.name: each.default for each in options(model) if each.default}
    assert load(model, shown | needed).settings == load(model, needed).settings


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_wrong_value_is_told_without_the_words_of_a_library(command: Command) -> None:
    words = re.compile(r"Input|valid (integer|number|string)|parse|Errno|\[type|cannot be used;")
    told = [
        sentence
        for option in options(imported(command.settings))
        for wrong in WRONG_VALUES
        for sentence in complaints_of(command, {option.name: wrong})
    ]
    assert told
    assert [sentence for sentence in told if words.search(sentence)] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_leads_to_a_function_that_runs_it(command: object) -> None:
    assert hasattr(command, "run")
    assert callable(imported(command.run))


@pytest.mark.parametrize("words", [[], ["key"], ["config"]])
def test_a_command_that_lacks_a_word_lists_what_there_is(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(words) == 2
    listed = capsys.readouterr().out
    assert main([*words, "--help"]) == 0
    assert capsys.readouterr().out == listed
    commands = [*(command.name for command in COMMANDS), *CONFIG]
    for name in commands:
        assert (f"\n  {name} " in listed) == (name.split()[0] in words or not words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sreve"], "there is no command sreve; did you mean serve? (see kvrouter --help)"),
        (["--verbose"], "there is no command --verbose (see kvrouter --help)"),
        (["key", "nwe"], "key nwe; did you mean key new? (see kvrouter key --help)"),
        (["bench", "serve"], "command bench; docs/bench.md names tools that measure a router (see"),
        (["record"], "command record; give kvrouter serve --record PATH (see"),
        (["config", "sho"], "config sho; did you mean config show? (see kvrouter config --help)"),
    ],
)
def test_an_unknown_command_names_the_nearest(
    capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert complaint in refused(capsys, *words)


def test_the_version_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvrouter {kvrouter.__version__}\n"
    module = [sys.executable, "-m", "kvrouter", "--version"]
    ran = subprocess.run(module, capture_output=True, text=True, check=True)
    assert ran.stdout == f"kvrouter {kvrouter.__version__}\n"
    assert kvrouter.__version__ == version("kvrouter")


def test_the_help_of_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kvrouter.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'pydantic', 'aiohttp', 'quart', 'zmq', 'yaml'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_page_of_settings_is_what_the_settings_are() -> None:
    page = configuration_page((c.name, c.help, imported(c.settings)) for c in COMMANDS)
    current = (ROOT / "docs" / "configuration.md").read_text()
    assert current == page, "write it anew: kvrouter config docs > docs/configuration.md"


def test_the_page_names_every_setting_of_the_router() -> None:
    page = configuration_page([("serve", "run", RouterSettings)])
    for option in options(RouterSettings):
        assert re.search(rf"`{option.flags[0]}( [A-Z:=]+)?`", page)
        assert f"`{option.env}`" in page
    assert not re.search(r"\|\s*\|\s*$", page, re.MULTILINE)


def test_settings_can_be_loaded_without_a_command_line() -> None:
    loaded = load(RouterSettings, {"decode": ["d:1"]})
    assert loaded.settings.decode == ["d:1"]
    assert loaded.origins == {"decode": "flag"}
    with pytest.raises(UsageError):
        load(RouterSettings, {})


def test_a_value_that_is_wanting_is_named_without_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = refused(capsys, "sim", "--port", "0", "--store-token", "hush")
    assert told == "kvrouter sim: --model: give a value (see kvrouter sim --help)\n"


def runs_well(settings: RouterSettings) -> None:
    assert settings.decode == ["d:1"]


def finds_its_port_taken(settings: RouterSettings) -> int:
    raise OSError(errno.EADDRINUSE, "address already in use")


def finds_the_disk_full(settings: RouterSettings) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def finds_settings_at_odds(settings: RouterSettings) -> int:
    raise UsageError("these two do not go together; leave one out")


def is_interrupted(settings: RouterSettings) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("run", "code", "told"),
    [
        (runs_well, 0, ""),
        (finds_its_port_taken, 1, "address already in use; give another port\n"),
        (finds_the_disk_full, 1, "No space left on device\n"),
        (finds_settings_at_odds, 2, "leave one out (see kvrouter x --help)\n"),
        (is_interrupted, 130, ""),
    ],
)
def test_how_a_command_ends_is_its_exit_code(
    capsys: pytest.CaptureFixture[str], run: Callable[[RouterSettings], int], code: int, told: str
) -> None:
    command = Command(
        "x", "run x", "", "kvrouter.app.settings:RouterSettings", f"{__name__}:{run.__name__}"
    )
    assert run_command(command, ["--decode", "d:1"]) == code
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize(
    "flags",
    [
        "serve --decode 127.0.0.1:1 --port {}",
        "serve --decode 127.0.0.1:1 --port 0 --control-port {}",
        "serve --decode 127.0.0.1:1 --port 0 --kv-events-bind tcp://127.0.0.1:{}",
        "sim --model m --port {}",
        "store --unix-socket none --port {}",
        "store --unix-socket none --port 0 --http-port {}",
    ],
)
def test_a_port_that_is_taken_is_told_by_its_address(flags: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "kvrouter", *flags.format(port).split()]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode in (1, 2)
    (told,) = (line for line in ran.stderr.splitlines() if line.startswith("kvrouter "))
    assert "Address already in use; " in told
    assert str(port) in told
    assert "Errno" not in told
    assert "(" not in told


def test_a_host_that_is_none_is_told_with_the_remedy() -> None:
    flags = ["serve", "--decode", "127.0.0.1:1", "--port", "0", "--host", "host.invalid"]
    command = [sys.executable, "-m", "kvrouter", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "cannot listen on host.invalid:0: " in ran.stderr
    assert "; give an address of this host" in ran.stderr
