"""`kvrouter demo --engine torch` with real engines, as a user runs it."""

import re
from pathlib import Path

import pytest
from tests.tools.demo.running import QUICK, Running, all_gone, descendants

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


def test_the_demo_runs_on_torch_engines_and_leaves_nothing_behind(
    model: Path, engine_command: list[str]
) -> None:
    python = engine_command[-3]
    flags = ["--engine", "torch", "--torch-python", python, "--model", str(model)]
    site = re.match("PYTHONPATH=(.*)", engine_command[1])
    demo = Running(*QUICK, *flags, environment={"PYTHONPATH": site[1]} if site else {})
    try:
        demo.until(r"\] warm: ")
        processes = descendants(demo.process.pid)
        assert demo.end(300) == 0, demo.said
    finally:
        demo.close()
    print(demo.said)
    assert len(processes) >= 4  # a store, a router, two engines
    assert all_gone(processes)
    assert "14 of 14 answers complete and right" in demo.said
    assert "prefill-0 was killed with 1 requests in flight" in demo.said
    found = re.search(r"^decode-0 +([\d,]+) +([\d,]+) +([\d,]+)$", demo.said, re.MULTILINE)
    assert found is not None
    computed, _, loaded = (int(number.replace(",", "")) for number in found.groups())
    assert loaded > computed > 0
