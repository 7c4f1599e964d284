"""The quickstarts: one screen each, and commands that a test runs or that say what they need."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, ROOT, blocks, commands
from tests.vllm.engines import free_port
from tests.vllm.nixl import TRANSFER, loopback_environment

from kvrouter.cli.main import COMMANDS, main

PAGES = sorted(DOCS.glob("quickstart*.md"))
BLOCKS = [(page.stem, words, lines) for page in PAGES for words, lines in blocks(page)]
OURS = {command.name for command in COMMANDS}
BARE = "bare container"  # tests/packaging/test_bare.py runs these
SCREEN_LINES = 60
ANSWERED = re.compile(r'"cached_tokens":(\d+)')


def on_free_ports(script: str) -> str:
    """The script, with the store's and the router's ports as flags too, where it uses defaults."""
    script = script.replace("kvrouter store", "kvrouter store --port 7400 --http-port 7480")
    script = script.replace("kvrouter serve", "kvrouter serve --port 8000")
    for port in ("7400", "7480", "8101", "8102", "8000"):
        script = re.sub(rf"\b{port}\b", str(free_port()), script)
    return script


def own_commands() -> list[list[str]]:
    """Every command of ours in the quickstarts, as words, but for those that take no settings."""
    lines = [shlex.split(line.rstrip(" &")) for _, _, block in BLOCKS for line in block]
    return [words for words in lines if words[0] == "kvrouter" and words[1] in OURS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_quickstart_fits_on_a_screen(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= SCREEN_LINES


@pytest.mark.parametrize(("page", "words", "lines"), BLOCKS)
def test_a_block_names_its_test_or_what_it_needs(page: str, words: str, lines: list[str]) -> None:
    assert lines
    if words != BARE:
        reason, _, where = words.removeprefix("needs ").rpartition(": ")
        assert words.startswith("needs ")
        assert reason
        assert (ROOT / where).exists()


def test_the_second_prompt_of_the_quickstart_comes_from_the_store(tmp_path: Path) -> None:
    _installed, _demo, *lines = commands(DOCS / "quickstart.md", BARE)
    script = on_free_ports("\n".join(["trap 'kill $(jobs -p); wait' EXIT", *lines]))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ANSWERED.findall(done.stdout) == ["0", "512"]
    assert "nothing found" in done.stdout


@pytest.mark.parametrize("words", own_commands(), ids=" ".join)
def test_the_products_parser_takes_a_command_of_the_quickstarts(words: list[str]) -> None:
    assert main(["config", "show", *words[1:]]) == 0


def test_the_quickstart_of_vllm_has_the_commands_that_the_readmes_test_runs() -> None:
    how = "needs vLLM's environment, 3.5 GB: tests/vllm/test_readme.py"
    shown = (ROOT / "README.md").read_text().partition("**With vLLM**")[2]
    readme = re.split(r"^\$ ", shown.partition("```console\n")[2].partition("```")[0], flags=re.M)
    started = [each.strip() for each in readme[1:]]
    assert len(started) == 6
    assert commands(DOCS / "quickstart-vllm.md", how)[: len(started)] == started


def test_the_quickstart_of_vllm_takes_on_cpus_what_the_tests_take() -> None:
    made = (ROOT / "tests/vllm/make_env.sh").read_text()
    pins = dict(re.findall(r'^(VLLM|TORCH|UNWANTED)="(.*)"$', made, re.MULTILINE))
    how = "needs 3.5 GB: tests/vllm/make_env.sh"
    _made, torch, vllm, unwanted = commands(DOCS / "quickstart-vllm.md", how)
    assert torch.endswith(f" {pins['TORCH']}+cpu")
    assert vllm.endswith(f" {pins['VLLM']}")
    assert unwanted.endswith(f" {pins['UNWANTED']}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_engines_of_a_quickstart_listen_on_this_machine_alone(page: Path) -> None:
    lines = [line for _, block in blocks(page) for line in block]
    engines = [line for line in lines if "vllm.entrypoints" in line]  # SGLang's default is this
    assert all("--host 127.0.0.1 " in line for line in engines)


def test_the_quickstart_of_nixl_configures_engines_as_their_test_does() -> None:
    text = (DOCS / "quickstart-nixl.md").read_text()
    configured = [json.loads(each) for each in re.findall(r"'(\{\"kv_connector.*\})'", text)]
    assert configured == [
        {**TRANSFER, "kv_role": f"kv_{role}"} for role in ("producer", "consumer")
    ]
    variables = set(re.findall(r"\b((?:UCX|VLLM_NIXL)_\w+)=", text))
    assert variables == loopback_environment().keys()


@pytest.mark.parametrize("name", ["quickstart-compose", "quickstart-kubernetes"])
def test_files_that_a_quickstart_names_are_there(name: str) -> None:
    named = set(re.findall(r"\bdeploy/[\w./-]*\w", (DOCS / f"{name}.md").read_text()))
    assert named
    assert {each for each in named if not (ROOT / each).exists()} == set()
