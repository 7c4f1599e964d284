"""`kvrouter demo --engine vllm` with real engines, as a user runs it."""

import re
from pathlib import Path

import pytest
from tests.tools.demo.running import QUICK, Running, all_gone, descendants, shared_memory
from tests.vllm.engines import OFFLINE
from tests.vllm.models import TINY, model_folder

DEADLINE_S = 500
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(DEADLINE_S + 60)]


def test_the_demo_runs_on_real_engines_and_leaves_nothing_behind(
    vllm_python: Path, site: Path | None
) -> None:
    model = model_folder(TINY, vllm_python)
    environment = OFFLINE if site is None else {**OFFLINE, "PYTHONPATH": str(site)}
    flags = ["--engine", "vllm", "--vllm-python", str(vllm_python), "--model", str(model)]
    demo = Running(*QUICK, *flags, environment=environment)
    try:
        demo.until(r"\] warm: ")
        processes = descendants(demo.process.pid)
        memory = shared_memory(processes)
        assert demo.end(DEADLINE_S) == 0, demo.said
    finally:
        demo.close()
    print(demo.said)
    assert len(processes) >= 6  # a store, a router, two engines with a process of their own each
    assert all_gone(processes)
    assert memory
    assert not any(each.exists() for each in memory)
    assert "14 of 14 answers complete and right" in demo.said
    assert "one engine alone gave the same tokens" in demo.said
    found = re.search(r"^decode-0 +([\d,]+) +([\d,]+) +([\d,]+)$", demo.said, re.MULTILINE)
    assert found is not None
    computed, own, loaded = (int(number.replace(",", "")) for number in found.groups())
    assert loaded > computed > 0
    assert own > 0
