"""`kvrouter demo --engine torch` where torch is not there. With it: tests/torch."""

import sys
from pathlib import Path

from tests.tools.demo.running import Running

TORCH = ["--engine", "torch", "--model", "no-model"]


def bare_python() -> str:
    """A Python that has neither torch nor the store."""
    return str(Path(sys.base_prefix) / "bin" / "python3")


def test_without_torch_it_says_what_to_install(running: type[Running]) -> None:
    demo = running(*TORCH, "--torch-python", bare_python())
    assert demo.end() == 2
    assert "has no torch" in demo.said
    assert "pip install 'kvrouter-store[torch-engine]'" in demo.said
    assert len(demo.said.splitlines()) == 1


def test_a_python_that_does_not_run_is_named(running: type[Running], tmp_path: Path) -> None:
    demo = running(*TORCH, "--torch-python", str(tmp_path / "python"))
    assert demo.end() == 2
    assert "name one with --torch-python" in demo.said


def test_an_engine_that_does_not_start_is_shown_with_its_log(
    running: type[Running], tmp_path: Path
) -> None:
    for package in ("torch", "transformers", "aiohttp", "kvrouter_store"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    engine = tmp_path / "kvrouter_store" / "torch_engine"
    engine.mkdir()
    (engine / "__init__.py").touch()
    (engine / "__main__.py").write_text("raise SystemExit('no-model cannot be served')")
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {bare_python()} "$@"\n')
    fake.chmod(0o755)
    demo = running(*TORCH, "--torch-python", str(fake))
    assert demo.end() == 1
    assert "did not start" in demo.said
    assert "no-model cannot be served" in demo.said
